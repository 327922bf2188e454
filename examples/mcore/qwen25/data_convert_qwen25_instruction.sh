#!/usr/bin/env bash
# Qwen2.5: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-7B}"
instruction_data --prompt-type qwen "$@"

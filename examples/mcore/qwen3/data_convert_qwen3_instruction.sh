#!/usr/bin/env bash
# Qwen3: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3-8B}"
instruction_data --prompt-type qwen3 "$@"

#!/usr/bin/env bash
# Llama 3.2: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Llama-3.2-1B}"
instruction_data --prompt-type llama3 "$@"

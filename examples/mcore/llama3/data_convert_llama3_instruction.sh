#!/usr/bin/env bash
# Llama 3: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Meta-Llama-3-8B}"
instruction_data --prompt-type llama3 "$@"

#!/usr/bin/env bash
# DeepSeek-V3: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/DeepSeek-V3}"
instruction_data --prompt-type deepseek3 "$@"

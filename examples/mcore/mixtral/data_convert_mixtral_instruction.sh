#!/usr/bin/env bash
# Mixtral: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Mixtral-8x7B-v0.1}"
instruction_data --prompt-type mixtral "$@"

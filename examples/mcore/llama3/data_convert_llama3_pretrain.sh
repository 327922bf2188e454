#!/usr/bin/env bash
# Llama 3: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Meta-Llama-3-8B}"
pretrain_data "$@"

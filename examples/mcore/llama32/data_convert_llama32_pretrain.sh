#!/usr/bin/env bash
# Llama 3.2: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Llama-3.2-1B}"
pretrain_data "$@"

#!/usr/bin/env bash
# Qwen2.5: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-7B}"
pretrain_data "$@"

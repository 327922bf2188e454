#!/usr/bin/env bash
# Qwen3: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3-8B}"
pretrain_data "$@"

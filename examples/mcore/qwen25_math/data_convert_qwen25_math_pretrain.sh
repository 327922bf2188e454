#!/usr/bin/env bash
# Qwen2.5-Math: documents for pretraining.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-Math-7B}"
pretrain_data "$@"

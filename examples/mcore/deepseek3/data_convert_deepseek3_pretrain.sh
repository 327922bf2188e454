#!/usr/bin/env bash
# DeepSeek-V3: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/DeepSeek-V3}"
pretrain_data "$@"

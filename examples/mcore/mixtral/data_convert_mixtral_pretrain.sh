#!/usr/bin/env bash
# Mixtral: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Mixtral-8x7B-v0.1}"
pretrain_data "$@"

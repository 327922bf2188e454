#!/usr/bin/env bash
# Qwen2.5 7B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-7B
: "${TP:=4}"
pretrain "$@"

#!/usr/bin/env bash
# Qwen3 8B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
: "${TP:=4}"
pretrain "$@"

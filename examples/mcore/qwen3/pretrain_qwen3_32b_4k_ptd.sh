#!/usr/bin/env bash
# Qwen3 32B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
: "${NNODES:=2}" "${TP:=8}" "${PP:=2}"
pretrain "$@"

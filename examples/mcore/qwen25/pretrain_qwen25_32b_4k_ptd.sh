#!/usr/bin/env bash
# Qwen2.5 32B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
: "${NNODES:=2}" "${TP:=8}" "${PP:=2}"
pretrain "$@"

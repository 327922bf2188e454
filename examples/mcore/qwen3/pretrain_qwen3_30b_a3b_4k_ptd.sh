#!/usr/bin/env bash
# Qwen3 30B-A3B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
: "${NNODES:=2}" "${TP:=4}" "${EP:=2}"
pretrain "$@"

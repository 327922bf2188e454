#!/usr/bin/env bash
# Qwen3 235B-A22B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
: "${NNODES:=16}" "${TP:=2}" "${PP:=16}" "${EP:=4}" "${NOOP_LAYERS:=5,95}" "${GBS:=512}"
pretrain megatron_training.num_layers=96 "$@"  # empty ones counted

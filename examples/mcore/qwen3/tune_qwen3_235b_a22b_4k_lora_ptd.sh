#!/usr/bin/env bash
# Qwen3 235B-A22B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
: "${NNODES:=16}" "${TP:=2}" "${PP:=16}" "${EP:=4}" "${NOOP_LAYERS:=5,95}" "${GBS:=128}"
tune_lora megatron_training.num_layers=96 "$@"  # empty ones counted

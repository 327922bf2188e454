#!/usr/bin/env bash
# Qwen3 30B-A3B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
: "${NNODES:=2}" "${TP:=4}" "${EP:=2}"
tune_lora "$@"

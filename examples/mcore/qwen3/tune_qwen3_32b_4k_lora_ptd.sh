#!/usr/bin/env bash
# Qwen3 32B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
: "${NNODES:=2}" "${TP:=8}" "${PP:=2}"
tune_lora "$@"

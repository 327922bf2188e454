#!/usr/bin/env bash
# Qwen2.5 32B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
: "${NNODES:=2}" "${TP:=8}" "${PP:=2}"
tune_lora "$@"

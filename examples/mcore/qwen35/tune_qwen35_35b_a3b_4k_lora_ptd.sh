#!/usr/bin/env bash
# Qwen3.5 35b_a3b: low-rank adapters of the language model with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_35b_a3b Qwen3.5-35B-A3B
: "${NNODES:=2}" "${TP:=2}" "${EP:=4}"
tune_lora "$@"

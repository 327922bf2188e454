#!/usr/bin/env bash
# Qwen3.5 27b: low-rank adapters of the language model with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_27b Qwen3.5-27B
: "${NNODES:=2}" "${TP:=4}"
tune_lora "$@"

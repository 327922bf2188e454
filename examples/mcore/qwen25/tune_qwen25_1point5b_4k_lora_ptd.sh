#!/usr/bin/env bash
# Qwen2.5 1.5B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_1p5b Qwen2.5-1.5B
: "${TP:=1}" "${MBS:=2}"
tune_lora "$@"

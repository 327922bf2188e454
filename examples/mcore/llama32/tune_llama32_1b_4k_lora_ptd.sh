#!/usr/bin/env bash
# Llama 3.2 1B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
: "${TP:=1}" "${MBS:=2}"
tune_lora "$@"

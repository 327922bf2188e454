#!/usr/bin/env bash
# Mixtral 8x7B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model mixtral_8x7b Mixtral-8x7B-v0.1
: "${NNODES:=2}" "${TP:=4}" "${PP:=2}" "${EP:=2}"
tune_lora "$@"

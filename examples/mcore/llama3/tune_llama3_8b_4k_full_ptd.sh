#!/usr/bin/env bash
# Llama 3 8B: tuning of all weights with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama3_8b Meta-Llama-3-8B
: "${TP:=4}"
tune_full "$@"

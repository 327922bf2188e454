#!/usr/bin/env bash
# Qwen3 8B: tuning of all weights with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
: "${TP:=4}"
tune_full "$@"

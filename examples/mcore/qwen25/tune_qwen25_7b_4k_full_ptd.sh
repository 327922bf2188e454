#!/usr/bin/env bash
# Qwen2.5 7B: tuning of all weights with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-7B
: "${TP:=4}"
tune_full "$@"

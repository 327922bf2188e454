#!/usr/bin/env bash
# Qwen3 0.6B: tuning of all weights with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
: "${TP:=1}" "${MBS:=4}"
tune_full "$@"

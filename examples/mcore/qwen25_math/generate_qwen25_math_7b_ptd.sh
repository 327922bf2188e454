#!/usr/bin/env bash
# Qwen2.5-Math 7B: one answer for each prompt.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-Math-7B
: "${TP:=4}"
generate "$@"

#!/usr/bin/env bash
# Qwen3 235B-A22B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
: "${TP:=4}"
chat --prompt-type qwen3 "$@"

#!/usr/bin/env bash
# Qwen3 30B-A3B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
: "${TP:=4}"
chat --prompt-type qwen3 "$@"

#!/usr/bin/env bash
# Qwen3 32B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
: "${TP:=4}"
chat --prompt-type qwen3 "$@"

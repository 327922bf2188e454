#!/usr/bin/env bash
# Qwen2.5 32B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
: "${TP:=4}"
chat --prompt-type qwen "$@"

#!/usr/bin/env bash
# Qwen2.5 7B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-7B
chat --prompt-type qwen "$@"

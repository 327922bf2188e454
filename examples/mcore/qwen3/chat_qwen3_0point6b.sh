#!/usr/bin/env bash
# Qwen3 0.6B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
chat --prompt-type qwen3 "$@"

#!/usr/bin/env bash
# Qwen3 8B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
chat --prompt-type qwen3 "$@"

#!/usr/bin/env bash
# Llama 3 8B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama3_8b Meta-Llama-3-8B
chat --prompt-type llama3 "$@"

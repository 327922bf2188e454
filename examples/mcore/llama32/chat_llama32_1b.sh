#!/usr/bin/env bash
# Llama 3.2 1B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
chat --prompt-type llama3 "$@"

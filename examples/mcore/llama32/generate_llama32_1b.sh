#!/usr/bin/env bash
# Llama 3.2 1B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
generate --prompt-type llama3 "$@"

#!/usr/bin/env bash
# Llama 3 8B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama3_8b Meta-Llama-3-8B
generate --prompt-type llama3 "$@"

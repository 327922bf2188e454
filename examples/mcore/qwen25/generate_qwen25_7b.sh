#!/usr/bin/env bash
# Qwen2.5 7B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-7B
generate --prompt-type qwen "$@"

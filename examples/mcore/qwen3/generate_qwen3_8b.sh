#!/usr/bin/env bash
# Qwen3 8B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
generate --prompt-type qwen3 "$@"

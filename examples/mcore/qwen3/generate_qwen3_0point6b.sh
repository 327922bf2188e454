#!/usr/bin/env bash
# Qwen3 0.6B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
generate --prompt-type qwen3 "$@"

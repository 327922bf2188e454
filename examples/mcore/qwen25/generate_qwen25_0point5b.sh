#!/usr/bin/env bash
# Qwen2.5 0.5B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_0p5b Qwen2.5-0.5B
generate --prompt-type qwen "$@"

#!/usr/bin/env bash
# Qwen3 32B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
: "${TP:=4}"
generate --prompt-type qwen3 "$@"

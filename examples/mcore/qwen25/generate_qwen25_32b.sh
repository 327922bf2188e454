#!/usr/bin/env bash
# Qwen2.5 32B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
: "${TP:=4}"
generate --prompt-type qwen "$@"

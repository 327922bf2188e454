#!/usr/bin/env bash
# Qwen3 30B-A3B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
: "${TP:=4}"
generate --prompt-type qwen3 "$@"

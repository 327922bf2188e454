#!/usr/bin/env bash
# Qwen3 235B-A22B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
: "${TP:=4}"
generate --prompt-type qwen3 "$@"

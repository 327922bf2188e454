#!/usr/bin/env bash
# Qwen3.5 4b: low-rank adapters of the language model with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_4b Qwen3.5-4B
: "${TP:=2}"
tune_lora "$@"

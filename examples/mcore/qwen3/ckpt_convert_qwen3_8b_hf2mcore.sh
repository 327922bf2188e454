#!/usr/bin/env bash
# Qwen3 8B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
: "${TP:=4}"
hf2mcore "$@"

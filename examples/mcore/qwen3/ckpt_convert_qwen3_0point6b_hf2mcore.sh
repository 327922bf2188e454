#!/usr/bin/env bash
# Qwen3 0.6B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
: "${TP:=1}"
hf2mcore "$@"

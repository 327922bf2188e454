#!/usr/bin/env bash
# Qwen2.5 0.5B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_0p5b Qwen2.5-0.5B
: "${TP:=1}"
hf2mcore "$@"

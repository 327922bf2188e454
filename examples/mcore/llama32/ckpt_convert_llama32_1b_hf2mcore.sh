#!/usr/bin/env bash
# Llama 3.2 1B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
: "${TP:=1}"
hf2mcore "$@"

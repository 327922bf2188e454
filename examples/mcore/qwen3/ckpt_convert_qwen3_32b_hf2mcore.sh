#!/usr/bin/env bash
# Qwen3 32B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
: "${TP:=8}" "${PP:=2}"
hf2mcore "$@"

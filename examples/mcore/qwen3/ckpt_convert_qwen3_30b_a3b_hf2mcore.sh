#!/usr/bin/env bash
# Qwen3 30B-A3B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
: "${TP:=4}" "${EP:=2}"
hf2mcore "$@"

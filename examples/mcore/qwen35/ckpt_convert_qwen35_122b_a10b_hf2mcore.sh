#!/usr/bin/env bash
# Qwen3.5 122b_a10b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_122b_a10b Qwen3.5-122B-A10B
: "${TP:=2}" "${PP:=4}" "${EP:=8}"
hf2mcore "$@"

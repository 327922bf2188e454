#!/usr/bin/env bash
# Qwen3.5 35b_a3b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_35b_a3b Qwen3.5-35B-A3B
: "${TP:=2}" "${EP:=4}"
hf2mcore "$@"

#!/usr/bin/env bash
# Qwen3-VL 30b_a3b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_30b_a3b Qwen3-VL-30B-A3B-Instruct
: "${TP:=4}" "${EP:=2}"
hf2mcore "$@"

#!/usr/bin/env bash
# Qwen3-VL 8b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_8b Qwen3-VL-8B-Instruct
: "${TP:=4}"
hf2mcore "$@"

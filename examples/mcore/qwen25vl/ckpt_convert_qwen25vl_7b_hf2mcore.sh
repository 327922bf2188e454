#!/usr/bin/env bash
# Qwen2.5-VL 7b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_vl_7b Qwen2.5-VL-7B-Instruct
: "${TP:=4}"
hf2mcore "$@"

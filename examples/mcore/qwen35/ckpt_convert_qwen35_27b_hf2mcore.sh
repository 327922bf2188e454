#!/usr/bin/env bash
# Qwen3.5 27b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_27b Qwen3.5-27B
: "${TP:=4}"
hf2mcore "$@"

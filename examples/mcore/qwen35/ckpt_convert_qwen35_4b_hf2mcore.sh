#!/usr/bin/env bash
# Qwen3.5 4b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_4b Qwen3.5-4B
: "${TP:=2}"
hf2mcore "$@"

#!/usr/bin/env bash
# Qwen3.5 9b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_9b Qwen3.5-9B
: "${TP:=2}"
hf2mcore "$@"

#!/usr/bin/env bash
# Llama 3.2 1B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
mcore2hf "$@"

#!/usr/bin/env bash
# Llama 3 8B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama3_8b Meta-Llama-3-8B
mcore2hf "$@"

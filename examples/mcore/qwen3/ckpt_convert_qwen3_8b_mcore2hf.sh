#!/usr/bin/env bash
# Qwen3 8B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
mcore2hf "$@"

#!/usr/bin/env bash
# Qwen3 32B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
mcore2hf "$@"

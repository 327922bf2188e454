#!/usr/bin/env bash
# Qwen3 0.6B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
mcore2hf "$@"

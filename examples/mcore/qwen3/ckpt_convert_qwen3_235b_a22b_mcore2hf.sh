#!/usr/bin/env bash
# Qwen3 235B-A22B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
mcore2hf "$@"

#!/usr/bin/env bash
# Qwen3 30B-A3B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
mcore2hf "$@"

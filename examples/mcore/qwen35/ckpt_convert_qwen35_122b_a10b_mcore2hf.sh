#!/usr/bin/env bash
# Qwen3.5 122b_a10b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_122b_a10b Qwen3.5-122B-A10B
mcore2hf "$@"

#!/usr/bin/env bash
# Qwen3.5 35b_a3b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_35b_a3b Qwen3.5-35B-A3B
mcore2hf "$@"

#!/usr/bin/env bash
# Qwen3-VL 30b_a3b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_30b_a3b Qwen3-VL-30B-A3B-Instruct
mcore2hf "$@"

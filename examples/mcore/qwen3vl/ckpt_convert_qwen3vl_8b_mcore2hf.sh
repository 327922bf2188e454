#!/usr/bin/env bash
# Qwen3-VL 8b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_8b Qwen3-VL-8B-Instruct
mcore2hf "$@"

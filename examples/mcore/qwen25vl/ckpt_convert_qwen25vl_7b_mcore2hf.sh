#!/usr/bin/env bash
# Qwen2.5-VL 7b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_vl_7b Qwen2.5-VL-7B-Instruct
mcore2hf "$@"

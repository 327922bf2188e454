#!/usr/bin/env bash
# Qwen2.5-Math 7B: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-Math-7B
mcore2hf "$@"

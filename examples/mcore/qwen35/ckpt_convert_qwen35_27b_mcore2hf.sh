#!/usr/bin/env bash
# Qwen3.5 27b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_27b Qwen3.5-27B
mcore2hf "$@"

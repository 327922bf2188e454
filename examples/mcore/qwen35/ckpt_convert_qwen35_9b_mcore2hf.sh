#!/usr/bin/env bash
# Qwen3.5 9b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_9b Qwen3.5-9B
mcore2hf "$@"

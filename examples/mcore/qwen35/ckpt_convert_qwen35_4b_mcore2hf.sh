#!/usr/bin/env bash
# Qwen3.5 4b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_4b Qwen3.5-4B
mcore2hf "$@"

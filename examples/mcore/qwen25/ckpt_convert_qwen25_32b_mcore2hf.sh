#!/usr/bin/env bash
# Qwen2.5 32B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
mcore2hf "$@"

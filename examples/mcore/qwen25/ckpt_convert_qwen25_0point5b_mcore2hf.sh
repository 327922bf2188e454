#!/usr/bin/env bash
# Qwen2.5 0.5B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_0p5b Qwen2.5-0.5B
mcore2hf "$@"

#!/usr/bin/env bash
# Mixtral 8x7B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model mixtral_8x7b Mixtral-8x7B-v0.1
mcore2hf "$@"

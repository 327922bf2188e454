#!/usr/bin/env bash
# Qwen3.5 397b_a17b: a Megatron checkpoint to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_397b_a17b Qwen3.5-397B-A17B
mcore2hf "$@"

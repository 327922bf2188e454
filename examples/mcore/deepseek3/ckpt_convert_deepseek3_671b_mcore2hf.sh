#!/usr/bin/env bash
# DeepSeek-V3 671B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model deepseekv3_671b DeepSeek-V3
mcore2hf "$@"

#!/usr/bin/env bash
# DeepSeek-V3 671B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model deepseekv3_671b DeepSeek-V3
: "${TP:=4}" "${PP:=8}" "${EP:=8}" "${NUM_LAYER_LIST:=7,7,8,8,8,8,8,7}"
hf2mcore "$@"

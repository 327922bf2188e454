#!/usr/bin/env bash
# DeepSeek-V3 671B: tuning of low-rank adapters with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model deepseekv3_671b DeepSeek-V3
: "${NNODES:=32}" "${TP:=4}" "${PP:=8}" "${EP:=8}" "${NUM_LAYER_LIST:=7,7,8,8,8,8,8,7}" "${GBS:=128}"
# latent attention has no linear_qkv
tune_lora megatron_training.lora_target_modules="[linear_proj,linear_fc1,linear_fc2]" "$@"

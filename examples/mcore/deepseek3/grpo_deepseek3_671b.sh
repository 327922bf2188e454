#!/usr/bin/env bash
# DeepSeek-V3 671B: GRPO. Settings not named here: configs/grpo_deepseek_r1_671b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model deepseekv3_671b DeepSeek-V3
: "${NNODES:=16}"
reinforce grpo_deepseek_r1_671b_A3 "$@"

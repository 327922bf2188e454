#!/usr/bin/env bash
# Qwen3 235B-A22B: GRPO. Settings not named here: configs/grpo_qwen3_235b_a22b_A2.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
: "${NNODES:=16}" "${NPUS_PER_NODE:=8}"
reinforce grpo_qwen3_235b_a22b_A2 "$@"

#!/usr/bin/env bash
# Qwen3-VL 30b_a3b: GRPO with images. Settings not named here: configs/grpo_qwen3_vl_30b_a3b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_30b_a3b Qwen3-VL-30B-A3B-Instruct
: "${NNODES:=2}"
reinforce grpo_qwen3_vl_30b_a3b_A3 "$@"

#!/usr/bin/env bash
# Qwen3-VL 8b: GRPO with images. Settings not named here: configs/grpo_qwen3_vl_8b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_8b Qwen3-VL-8B-Instruct
reinforce grpo_qwen3_vl_8b_A3 "$@"

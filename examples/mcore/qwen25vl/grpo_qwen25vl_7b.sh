#!/usr/bin/env bash
# Qwen2.5-VL 7b: GRPO with images. Settings not named here: configs/grpo_qwen25_vl_7b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_vl_7b Qwen2.5-VL-7B-Instruct
reinforce grpo_qwen25_vl_7b_A3 "$@"

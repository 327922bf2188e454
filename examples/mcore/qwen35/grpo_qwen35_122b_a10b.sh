#!/usr/bin/env bash
# Qwen3.5 122b_a10b: GRPO with images. Settings not named here: configs/grpo_qwen35_122b_a10b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_122b_a10b Qwen3.5-122B-A10B
: "${NNODES:=8}"
reinforce grpo_qwen35_122b_a10b_A3 "$@"

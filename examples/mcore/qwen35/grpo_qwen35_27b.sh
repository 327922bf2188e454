#!/usr/bin/env bash
# Qwen3.5 27b: GRPO with images. Settings not named here: configs/grpo_qwen35_27b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_27b Qwen3.5-27B
: "${NNODES:=2}"
reinforce grpo_qwen35_27b_A3 "$@"

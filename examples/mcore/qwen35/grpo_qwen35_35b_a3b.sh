#!/usr/bin/env bash
# Qwen3.5 35b_a3b: GRPO with images. Settings not named here: configs/grpo_qwen35_35b_a3b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_35b_a3b Qwen3.5-35B-A3B
: "${NNODES:=2}"
reinforce grpo_qwen35_35b_a3b_A3 "$@"

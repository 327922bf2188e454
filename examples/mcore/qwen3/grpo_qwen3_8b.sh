#!/usr/bin/env bash
# Qwen3 8B: GRPO. Settings not named here: configs/grpo_qwen3_8b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_8b Qwen3-8B
reinforce grpo_qwen3_8b_A3 "$@"

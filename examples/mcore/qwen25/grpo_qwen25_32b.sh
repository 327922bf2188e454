#!/usr/bin/env bash
# Qwen2.5 32B: GRPO. Settings not named here: configs/grpo_qwen25_32b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
reinforce grpo_qwen25_32b_A3 "$@"

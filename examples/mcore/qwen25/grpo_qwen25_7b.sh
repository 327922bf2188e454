#!/usr/bin/env bash
# Qwen2.5 7B: GRPO. Settings not named here: configs/grpo_qwen25_7b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_7b Qwen2.5-7B
reinforce grpo_qwen25_7b_A3 "$@"

#!/usr/bin/env bash
# Qwen3.5 9b: GRPO with images. Settings not named here: configs/grpo_qwen35_9b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_9b Qwen3.5-9B
reinforce grpo_qwen35_9b_A3 "$@"

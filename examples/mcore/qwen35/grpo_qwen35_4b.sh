#!/usr/bin/env bash
# Qwen3.5 4b: GRPO with images. Settings not named here: configs/grpo_qwen35_4b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_4b Qwen3.5-4B
reinforce grpo_qwen35_4b_A3 "$@"

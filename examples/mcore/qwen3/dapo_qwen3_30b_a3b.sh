#!/usr/bin/env bash
# Qwen3 30B-A3B: DAPO. Settings not named here: configs/dapo_qwen3_30b_a3b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
reinforce dapo_qwen3_30b_a3b_A3 "$@"

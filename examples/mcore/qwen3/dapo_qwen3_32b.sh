#!/usr/bin/env bash
# Qwen3 32B: DAPO. Settings not named here: configs/dapo_qwen3_32b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
reinforce dapo_qwen3_32b_A3 "$@"

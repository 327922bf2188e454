#!/usr/bin/env bash
# Qwen2.5 32B: DAPO. Settings not named here: configs/dapo_qwen25_32b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
reinforce dapo_qwen25_32b_A3 "$@"

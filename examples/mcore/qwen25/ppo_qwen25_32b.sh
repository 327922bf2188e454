#!/usr/bin/env bash
# Qwen2.5 32B: PPO. Settings not named here: configs/ppo_qwen25_32b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_32b Qwen2.5-32B
: "${NNODES:=2}"
ppo ppo_qwen25_32b_A3 "$@"

#!/usr/bin/env bash
# Qwen3.5 397b_a17b: GRPO with images. Settings not named here: configs/grpo_qwen35_397b_a17b_A3.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_397b_a17b Qwen3.5-397B-A17B
: "${NNODES:=8}"
reinforce grpo_qwen35_397b_a17b_A3 "$@"

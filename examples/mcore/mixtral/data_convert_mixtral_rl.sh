#!/usr/bin/env bash
# Mixtral: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Mixtral-8x7B-v0.1}"
rl_data "$@"

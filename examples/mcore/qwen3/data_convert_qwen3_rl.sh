#!/usr/bin/env bash
# Qwen3: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3-8B}"
rl_data "$@"

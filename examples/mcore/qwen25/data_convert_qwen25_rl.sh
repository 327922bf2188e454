#!/usr/bin/env bash
# Qwen2.5: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-7B}"
rl_data "$@"

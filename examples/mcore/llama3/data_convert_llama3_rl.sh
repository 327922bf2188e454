#!/usr/bin/env bash
# Llama 3: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Meta-Llama-3-8B}"
rl_data "$@"

#!/usr/bin/env bash
# Llama 3.2: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Llama-3.2-1B}"
rl_data "$@"

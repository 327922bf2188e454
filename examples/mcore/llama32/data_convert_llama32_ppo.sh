#!/usr/bin/env bash
# Llama 3.2: prompts without answers, for GRPO and PPO with a reward model.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Llama-3.2-1B}"
ppo_data --prompt-type llama3 "$@"

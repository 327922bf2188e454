#!/usr/bin/env bash
# Llama 3: prompts without answers, for GRPO and PPO with a reward model.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Meta-Llama-3-8B}"
ppo_data --prompt-type llama3 "$@"

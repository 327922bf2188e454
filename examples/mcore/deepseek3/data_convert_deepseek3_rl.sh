#!/usr/bin/env bash
# DeepSeek-V3: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/DeepSeek-V3}"
rl_data "$@"

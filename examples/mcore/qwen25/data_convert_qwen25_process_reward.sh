#!/usr/bin/env bash
# Qwen2.5: solutions with a judgement of each step, for process reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-7B}"
process_reward_data "$@"

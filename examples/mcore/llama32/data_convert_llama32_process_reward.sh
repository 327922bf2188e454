#!/usr/bin/env bash
# Llama 3.2: solutions with a judgement of each step, for process reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Llama-3.2-1B}"
process_reward_data "$@"

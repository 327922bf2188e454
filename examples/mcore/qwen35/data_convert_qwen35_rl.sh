#!/usr/bin/env bash
# Qwen3.5: prompts with images and reference answers for GRPO; rows with <image> and a column images.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3.5-9B}"
rl_data --prompt-type hf "$@"

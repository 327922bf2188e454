#!/usr/bin/env bash
# Qwen2.5-VL: prompts with images and reference answers for GRPO; rows with <image> and a column images.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-VL-7B-Instruct}"
rl_data --prompt-type hf "$@"

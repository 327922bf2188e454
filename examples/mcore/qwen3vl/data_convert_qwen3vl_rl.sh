#!/usr/bin/env bash
# Qwen3-VL: prompts with images and reference answers for GRPO; rows with <image> and a column images.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3-VL-8B-Instruct}"
rl_data --prompt-type hf "$@"

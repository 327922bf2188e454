#!/usr/bin/env bash
# Qwen3-VL: conversations with images for supervised tuning; rows with parts of messages, or <image> and a column images.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3-VL-8B-Instruct}"
instruction_data --handler-name OpenAIInstructionHandler --prompt-type hf "$@"

#!/usr/bin/env bash
# Qwen2.5-VL: conversations with images for supervised tuning; rows with parts of messages, or <image> and a column images.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-VL-7B-Instruct}"
instruction_data --handler-name OpenAIInstructionHandler --prompt-type hf "$@"

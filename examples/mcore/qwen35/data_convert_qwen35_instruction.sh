#!/usr/bin/env bash
# Qwen3.5: conversations with images for supervised tuning; rows with parts of messages, or <image> and a column images.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3.5-9B}"
instruction_data --handler-name OpenAIInstructionHandler --prompt-type hf "$@"

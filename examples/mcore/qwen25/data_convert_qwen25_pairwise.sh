#!/usr/bin/env bash
# Qwen2.5: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen2.5-7B}"
pairwise_data --prompt-type qwen "$@"

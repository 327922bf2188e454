#!/usr/bin/env bash
# Qwen3: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Qwen3-8B}"
pairwise_data --prompt-type qwen3 "$@"

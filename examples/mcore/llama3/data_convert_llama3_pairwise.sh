#!/usr/bin/env bash
# Llama 3: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Meta-Llama-3-8B}"
pairwise_data --prompt-type llama3 "$@"

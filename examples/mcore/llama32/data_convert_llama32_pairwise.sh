#!/usr/bin/env bash
# Llama 3.2: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Llama-3.2-1B}"
pairwise_data --prompt-type llama3 "$@"

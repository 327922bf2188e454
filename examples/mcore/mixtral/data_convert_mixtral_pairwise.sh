#!/usr/bin/env bash
# Mixtral: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/Mixtral-8x7B-v0.1}"
pairwise_data --prompt-type mixtral "$@"

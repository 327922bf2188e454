#!/usr/bin/env bash
# DeepSeek-V3: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TOKENIZER_PATH:=./models/DeepSeek-V3}"
pairwise_data --prompt-type deepseek3 "$@"

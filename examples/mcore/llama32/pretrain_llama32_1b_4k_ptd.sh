#!/usr/bin/env bash
# Llama 3.2 1B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
: "${TP:=1}" "${MBS:=2}"
pretrain "$@"

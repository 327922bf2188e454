#!/usr/bin/env bash
# Llama 3 8B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama3_8b Meta-Llama-3-8B
: "${TP:=4}"
pretrain "$@"

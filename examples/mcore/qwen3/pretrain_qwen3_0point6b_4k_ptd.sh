#!/usr/bin/env bash
# Qwen3 0.6B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
: "${TP:=1}" "${MBS:=4}"
pretrain "$@"

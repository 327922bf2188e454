#!/usr/bin/env bash
# Qwen2.5 0.5B: pretraining with 4096 tokens, from the weights in LOAD_DIR.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_0p5b Qwen2.5-0.5B
: "${TP:=1}" "${MBS:=4}"
pretrain "$@"

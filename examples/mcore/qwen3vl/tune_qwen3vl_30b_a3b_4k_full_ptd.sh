#!/usr/bin/env bash
# Qwen3-VL 30b_a3b: tuning of the language model with 4096 tokens; add megatron_training.freeze_vit=false to train the tower too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_30b_a3b Qwen3-VL-30B-A3B-Instruct
: "${NNODES:=2}" "${TP:=4}" "${EP:=2}"
tune_full "$@"

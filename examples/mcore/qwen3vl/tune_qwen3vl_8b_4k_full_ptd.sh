#!/usr/bin/env bash
# Qwen3-VL 8b: tuning of the language model with 4096 tokens; add megatron_training.freeze_vit=false to train the tower too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_vl_8b Qwen3-VL-8B-Instruct
: "${TP:=4}"
tune_full "$@"

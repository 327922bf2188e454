#!/usr/bin/env bash
# Qwen2.5-VL 7b: tuning of the language model with 4096 tokens; add megatron_training.freeze_vit=false to train the tower too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_vl_7b Qwen2.5-VL-7B-Instruct
: "${TP:=4}"
tune_full "$@"

#!/usr/bin/env bash
# Qwen3.5 9b: tuning of the language model with 4096 tokens; add megatron_training.freeze_vit=false to train the tower too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_9b Qwen3.5-9B
: "${TP:=2}"
tune_full megatron_training.recompute_granularity=full megatron_training.recompute_method=uniform \
    megatron_training.recompute_num_layers=1 "$@"

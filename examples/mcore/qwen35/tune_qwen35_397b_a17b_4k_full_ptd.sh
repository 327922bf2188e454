#!/usr/bin/env bash
# Qwen3.5 397b_a17b: tuning of the language model with 4096 tokens; add megatron_training.freeze_vit=false to train the tower too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_397b_a17b Qwen3.5-397B-A17B
: "${NNODES:=16}" "${TP:=2}" "${PP:=4}" "${EP:=16}" "${GBS:=128}"
tune_full megatron_training.recompute_granularity=full megatron_training.recompute_method=uniform \
    megatron_training.recompute_num_layers=1 megatron_training.swap_optimizer=true "$@"

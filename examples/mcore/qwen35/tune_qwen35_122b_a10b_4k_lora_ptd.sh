#!/usr/bin/env bash
# Qwen3.5 122b_a10b: low-rank adapters of the language model with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_122b_a10b Qwen3.5-122B-A10B
: "${NNODES:=8}" "${TP:=2}" "${PP:=4}" "${EP:=8}"
tune_lora megatron_training.recompute_granularity=full megatron_training.recompute_method=uniform \
    megatron_training.recompute_num_layers=1 "$@"

#!/usr/bin/env bash
# Qwen3.5 397b_a17b: low-rank adapters of the language model with 4096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_397b_a17b Qwen3.5-397B-A17B
: "${NNODES:=8}" "${TP:=2}" "${PP:=4}" "${EP:=8}"
tune_lora megatron_training.recompute_granularity=full megatron_training.recompute_method=uniform \
    megatron_training.recompute_num_layers=1 "$@"

#!/usr/bin/env bash
# Qwen3.5 4b: tuning of the language model with 4096 tokens; add megatron_training.freeze_vit=false to train the tower too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_4b Qwen3.5-4B
: "${TP:=2}"
tune_full "$@"

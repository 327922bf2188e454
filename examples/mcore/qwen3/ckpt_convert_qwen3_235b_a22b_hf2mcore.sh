#!/usr/bin/env bash
# Qwen3 235B-A22B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_235b_a22b Qwen3-235B-A22B
: "${TP:=2}" "${PP:=16}" "${EP:=4}" "${NOOP_LAYERS:=5,95}"
hf2mcore "$@"

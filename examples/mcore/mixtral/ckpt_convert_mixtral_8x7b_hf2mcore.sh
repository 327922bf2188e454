#!/usr/bin/env bash
# Mixtral 8X7B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/Mixtral-8x7B-v0.1}"
SAVE_DIR="${SAVE_DIR:-./ckpt/mixtral_8x7b_mcore}"
TP="${TP:-4}"
PP="${PP:-2}"
EP="${EP:-2}"

LAYOUT_ARGS=(
    --target-tensor-parallel-size "$TP"
    --target-pipeline-parallel-size "$PP"
    --target-expert-parallel-size "$EP"
    --moe-grouped-gemm
    --moe-tp-extend-ep
)

convert --load-model-type hf --save-model-type mg --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" "${LAYOUT_ARGS[@]}"

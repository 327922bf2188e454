#!/usr/bin/env bash
# Qwen3 30B-A3B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/Qwen3-30B-A3B}"
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_30b_a3b_mcore}"
TP="${TP:-4}"
PP="${PP:-1}"
EP="${EP:-2}"

LAYOUT_ARGS=(
    --target-tensor-parallel-size "$TP"
    --target-pipeline-parallel-size "$PP"
    --target-expert-parallel-size "$EP"
    --moe-grouped-gemm
    --moe-tp-extend-ep
)

convert --load-model-type hf --save-model-type mg --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" "${LAYOUT_ARGS[@]}"

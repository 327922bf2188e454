#!/usr/bin/env bash
# Qwen3 235B-A22B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/Qwen3-235B-A22B}"
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_235b_a22b_mcore}"
TP="${TP:-2}"
PP="${PP:-16}"
EP="${EP:-4}"
NOOP_LAYERS="${NOOP_LAYERS:-5,95}"  # empty layers that make the pipeline even

LAYOUT_ARGS=(
    --target-tensor-parallel-size "$TP"
    --target-pipeline-parallel-size "$PP"
    --target-expert-parallel-size "$EP"
    --moe-grouped-gemm
    --moe-tp-extend-ep
    --noop-layers "$NOOP_LAYERS"
)

convert --load-model-type hf --save-model-type mg --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" "${LAYOUT_ARGS[@]}"

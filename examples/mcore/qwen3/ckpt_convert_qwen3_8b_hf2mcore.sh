#!/usr/bin/env bash
# Qwen3 8B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/Qwen3-8B}"
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_8b_mcore}"
TP="${TP:-4}"
PP="${PP:-1}"

LAYOUT_ARGS=(
    --target-tensor-parallel-size "$TP"
    --target-pipeline-parallel-size "$PP"
)

convert --load-model-type hf --save-model-type mg --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" "${LAYOUT_ARGS[@]}"

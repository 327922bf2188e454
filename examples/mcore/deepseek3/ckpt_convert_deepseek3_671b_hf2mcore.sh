#!/usr/bin/env bash
# DeepSeek-V3 671B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/DeepSeek-V3}"
SAVE_DIR="${SAVE_DIR:-./ckpt/deepseekv3_671b_mcore}"
TP="${TP:-4}"
PP="${PP:-8}"
EP="${EP:-8}"
NUM_LAYER_LIST="${NUM_LAYER_LIST:-7,7,8,8,8,8,8,7}"  # layers of each pipeline stage

LAYOUT_ARGS=(
    --target-tensor-parallel-size "$TP"
    --target-pipeline-parallel-size "$PP"
    --target-expert-parallel-size "$EP"
    --moe-grouped-gemm
    --moe-tp-extend-ep
    --num-layer-list "$NUM_LAYER_LIST"
)

convert --load-model-type hf --save-model-type mg --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" "${LAYOUT_ARGS[@]}"

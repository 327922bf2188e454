#!/usr/bin/env bash
# Qwen3 235B-A22B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./ckpt/qwen3_235b_a22b_mcore}"
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_235b_a22b_hf}"
HF_DIR="${HF_DIR:-./models/Qwen3-235B-A22B}"  # config.json and tokenizer of the model

convert --load-model-type mg --save-model-type hf --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" --hf-cfg-dir "$HF_DIR"

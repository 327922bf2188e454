#!/usr/bin/env bash
# Mixtral 8X7B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./ckpt/mixtral_8x7b_mcore}"
SAVE_DIR="${SAVE_DIR:-./ckpt/mixtral_8x7b_hf}"
HF_DIR="${HF_DIR:-./models/Mixtral-8x7B-v0.1}"  # config.json and tokenizer of the model

convert --load-model-type mg --save-model-type hf --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" --hf-cfg-dir "$HF_DIR"

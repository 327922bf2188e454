#!/usr/bin/env bash
# Qwen2.5 32B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./ckpt/qwen25_32b_mcore}"
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen25_32b_hf}"
HF_DIR="${HF_DIR:-./models/Qwen2.5-32B}"  # config.json and tokenizer of the model

convert --load-model-type mg --save-model-type hf --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" --hf-cfg-dir "$HF_DIR"

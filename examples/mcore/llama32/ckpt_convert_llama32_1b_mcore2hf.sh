#!/usr/bin/env bash
# Llama 3.2 1B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./ckpt/llama32_1b_mcore}"
SAVE_DIR="${SAVE_DIR:-./ckpt/llama32_1b_hf}"
HF_DIR="${HF_DIR:-./models/Llama-3.2-1B}"  # config.json and tokenizer of the model

convert --load-model-type mg --save-model-type hf --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" --hf-cfg-dir "$HF_DIR"

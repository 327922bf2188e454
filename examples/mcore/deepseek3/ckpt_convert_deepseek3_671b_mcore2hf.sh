#!/usr/bin/env bash
# DeepSeek-V3 671B: a Megatron checkpoint, under any split, to a Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./ckpt/deepseekv3_671b_mcore}"
SAVE_DIR="${SAVE_DIR:-./ckpt/deepseekv3_671b_hf}"
HF_DIR="${HF_DIR:-./models/DeepSeek-V3}"  # config.json and tokenizer of the model

convert --load-model-type mg --save-model-type hf --load-dir "$LOAD_DIR" --save-dir "$SAVE_DIR" --hf-cfg-dir "$HF_DIR"

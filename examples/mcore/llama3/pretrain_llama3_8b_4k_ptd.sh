#!/usr/bin/env bash
# Llama 3 8B: pretraining with 4096 tokens, from the weights in LOAD_DIR. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Meta-Llama-3-8B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/llama3_pretrain/data_text_document}"  # prefix that data_convert_llama3_* wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/llama3_8b_pretrain}"
TP="${TP:-4}"
PP="${PP:-1}"
MBS="${MBS:-1}"
GBS="${GBS:-256}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

TRAIN_ARGS=(
    megatron_training.model=llama3_8b
    megatron_training.lr=1e-5
    megatron_training.min_lr=1e-6
)

supervised pretrain "${TRAIN_ARGS[@]}" "$@"

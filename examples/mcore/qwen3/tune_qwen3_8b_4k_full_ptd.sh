#!/usr/bin/env bash
# Qwen3 8B: tuning of all weights with 4096 tokens. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Qwen3-8B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/qwen3_instruction/data}"  # prefix that data_convert_qwen3_* wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_8b_tune_full}"
TP="${TP:-4}"
PP="${PP:-1}"
MBS="${MBS:-1}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

TRAIN_ARGS=(
    megatron_training.model=qwen3_8b
    megatron_training.lr=1e-6
    megatron_training.min_lr=1e-7
)

supervised tune_full "${TRAIN_ARGS[@]}" "$@"

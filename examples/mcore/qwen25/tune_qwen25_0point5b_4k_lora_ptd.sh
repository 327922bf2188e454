#!/usr/bin/env bash
# Qwen2.5 0.5B: tuning of low-rank adapters with 4096 tokens. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Qwen2.5-0.5B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/qwen25_instruction/data}"  # prefix that data_convert_qwen25_* wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen25_0p5b_tune_lora}"
TP="${TP:-1}"
PP="${PP:-1}"
MBS="${MBS:-4}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

TRAIN_ARGS=(
    megatron_training.model=qwen25_0p5b
    megatron_training.lr=1e-4
    megatron_training.min_lr=1e-5
    megatron_training.lora_r="${LORA_R:-8}"
    megatron_training.lora_alpha="${LORA_ALPHA:-16}"
)

supervised tune_lora "${TRAIN_ARGS[@]}" "$@"

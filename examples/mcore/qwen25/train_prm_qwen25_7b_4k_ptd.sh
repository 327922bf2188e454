#!/usr/bin/env bash
# Qwen2.5 7B: process reward model, with 4096 tokens. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Qwen2.5-7B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/qwen25_process_reward/data}"  # prefix that data_convert_qwen25_process_reward.sh wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen25_7b_prm}"
TP="${TP:-4}"
PP="${PP:-1}"
MBS="${MBS:-1}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"

TRAIN_ARGS=(
    megatron_training.stage=prm
    megatron_training.model=qwen25_7b
    megatron_training.lr=1e-6
    megatron_training.min_lr=1e-7
    "megatron_training.placeholder_token='${PLACEHOLDER_TOKEN:-ки}'"  # as given to preprocessing
    "megatron_training.reward_tokens=[${REWARD_TOKENS:-'+','-'}]"
)

supervised judge "${TRAIN_ARGS[@]}" "$@"

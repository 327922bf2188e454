#!/usr/bin/env bash
# Llama 3.2 1B: simple preference optimization, without a reference, with 4096 tokens. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Llama-3.2-1B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/llama32_pairwise/data}"  # prefix that data_convert_llama32_pairwise.sh wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/llama32_1b_simpo}"
TP="${TP:-1}"
PP="${PP:-1}"
MBS="${MBS:-2}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"

TRAIN_ARGS=(
    megatron_training.stage=simpo
    megatron_training.model=llama32_1b
    megatron_training.lr=5e-7
    megatron_training.min_lr=5e-8
    megatron_training.simpo_beta="${SIMPO_BETA:-2.5}"
    megatron_training.gamma_beta_ratio="${GAMMA_BETA_RATIO:-1.4}"
)

supervised judge "${TRAIN_ARGS[@]}" "$@"

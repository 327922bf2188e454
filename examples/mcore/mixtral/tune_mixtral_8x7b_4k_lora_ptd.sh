#!/usr/bin/env bash
# Mixtral 8X7B: tuning of low-rank adapters with 4096 tokens. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-2}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Mixtral-8x7B-v0.1}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/mixtral_instruction/data}"  # prefix that data_convert_mixtral_* wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/mixtral_8x7b_tune_lora}"
TP="${TP:-4}"
PP="${PP:-2}"
EP="${EP:-2}"
MBS="${MBS:-1}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

PARALLEL_ARGS=(
    megatron_training.expert_model_parallel_size="$EP"
    megatron_training.moe_tp_extend_ep=true
)

TRAIN_ARGS=(
    megatron_training.model=mixtral_8x7b
    megatron_training.lr=1e-4
    megatron_training.min_lr=1e-5
    megatron_training.lora_r="${LORA_R:-8}"
    megatron_training.lora_alpha="${LORA_ALPHA:-16}"
)

supervised tune_lora "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "$@"

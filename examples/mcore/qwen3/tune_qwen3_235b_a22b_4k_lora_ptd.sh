#!/usr/bin/env bash
# Qwen3 235B-A22B: tuning of low-rank adapters with 4096 tokens. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-16}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Qwen3-235B-A22B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/qwen3_instruction/data}"  # prefix that data_convert_qwen3_* wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_235b_a22b_tune_lora}"
TP="${TP:-2}"
PP="${PP:-16}"
EP="${EP:-4}"
NOOP_LAYERS="${NOOP_LAYERS:-5,95}"  # empty layers that make the pipeline even
MBS="${MBS:-1}"
GBS="${GBS:-128}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

PARALLEL_ARGS=(
    megatron_training.expert_model_parallel_size="$EP"
    megatron_training.moe_tp_extend_ep=true
    megatron_training.num_layers=96  # empty ones counted
    "megatron_training.noop_layers='$NOOP_LAYERS'"
)

TRAIN_ARGS=(
    megatron_training.model=qwen3_235b_a22b
    megatron_training.lr=1e-4
    megatron_training.min_lr=1e-5
    megatron_training.lora_r="${LORA_R:-8}"
    megatron_training.lora_alpha="${LORA_ALPHA:-16}"
)

supervised tune_lora "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "$@"

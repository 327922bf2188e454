#!/usr/bin/env bash
# Qwen3 30B-A3B: DAPO. Settings not named here: configs/dapo_qwen3_30b_a3b_A3.yaml.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Qwen3-30B-A3B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/qwen3_rl/data}"  # prefix that data_convert_qwen3_rl.sh wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen3_30b_a3b_dapo}"
TRAIN_ITERS="${TRAIN_ITERS:-500}"

RUN_ARGS=(
    rl_config.actor_resource.num_npus="$(( NNODES * NPUS_PER_NODE ))"
    megatron_training.train_iters="$TRAIN_ITERS"
)

reinforce dapo_qwen3_30b_a3b_A3 "${RUN_ARGS[@]}" "$@"

#!/usr/bin/env bash
# Qwen2.5 32B: PPO. Settings not named here: configs/ppo_qwen25_32b_A3.yaml.
NNODES="${NNODES:-2}"
NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Qwen2.5-32B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/qwen25_rl/data}"  # prefix that data_convert_qwen25_rl.sh wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/qwen25_32b_ppo}"
TRAIN_ITERS="${TRAIN_ITERS:-500}"

RUN_ARGS=(
    rl_config.actor_resource.num_npus="$(( NNODES * NPUS_PER_NODE ))"
    megatron_training.train_iters="$TRAIN_ITERS"
)

CRITIC_ARGS=(
    critic_config.load="${CRITIC_LOAD_DIR:-$MODEL_DIR}"
    critic_config.save="${CRITIC_SAVE_DIR:-./ckpt/qwen25_32b_ppo_critic}"
)

reinforce ppo_qwen25_32b_A3 "${RUN_ARGS[@]}" "${CRITIC_ARGS[@]}" "$@"

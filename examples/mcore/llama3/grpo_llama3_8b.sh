#!/usr/bin/env bash
# Llama 3 8B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/Meta-Llama-3-8B}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/llama3_rl/data}"  # prefix that data_convert_llama3_rl.sh wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/llama3_8b_grpo}"
TRAIN_ITERS="${TRAIN_ITERS:-500}"
TP="${TP:-4}"
PP="${PP:-1}"
INFER_TP="${INFER_TP:-1}"
MBS="${MBS:-1}"
GBS="${GBS:-32}"  # prompts of one iteration
N_SAMPLES="${N_SAMPLES:-8}"  # responses to a prompt

PARALLEL_ARGS=(
    rl_config.actor_resource.num_npus="$(( NNODES * NPUS_PER_NODE ))"
    actor_config.tensor_model_parallel_size="$TP"
    actor_config.pipeline_model_parallel_size="$PP"
    generate_config.infer_tensor_parallel_size="$INFER_TP"
)

RUN_ARGS=(
    megatron_training.model=llama3_8b
    actor_config.model=llama3_8b
    actor_config.micro_batch_size="$MBS"
    megatron_training.global_batch_size="$GBS"
    rl_config.mini_batch_size="$GBS"
    rl_config.n_samples_per_prompt="$N_SAMPLES"
    megatron_training.train_iters="$TRAIN_ITERS"
)

reinforce grpo "${PARALLEL_ARGS[@]}" "${RUN_ARGS[@]}" "$@"

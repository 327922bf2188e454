#!/usr/bin/env bash
# DeepSeek-V3 671B: pretraining with 4096 tokens, from the weights in LOAD_DIR. DRY_RUN=1 prints the command and explains the run.
NNODES="${NNODES:-32}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL_DIR="${MODEL_DIR:-./models/DeepSeek-V3}"
LOAD_DIR="${LOAD_DIR:-$MODEL_DIR}"  # a Hugging Face folder or a Megatron checkpoint
DATA_PATH="${DATA_PATH:-./dataset/deepseek3_pretrain/data_text_document}"  # prefix that data_convert_deepseek3_* wrote
SAVE_DIR="${SAVE_DIR:-./ckpt/deepseekv3_671b_pretrain}"
TP="${TP:-4}"
PP="${PP:-8}"
EP="${EP:-8}"
NUM_LAYER_LIST="${NUM_LAYER_LIST:-7,7,8,8,8,8,8,7}"  # layers of each pipeline stage
MBS="${MBS:-1}"
GBS="${GBS:-512}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

PARALLEL_ARGS=(
    megatron_training.expert_model_parallel_size="$EP"
    megatron_training.moe_tp_extend_ep=true
    "megatron_training.num_layer_list='$NUM_LAYER_LIST'"
)

TRAIN_ARGS=(
    megatron_training.model=deepseekv3_671b
    megatron_training.lr=1e-5
    megatron_training.min_lr=1e-6
)

supervised pretrain "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "$@"

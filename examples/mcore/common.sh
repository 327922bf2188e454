# shellcheck shell=bash
# Sourced by every script of the folders beside this file. A script says what differs and calls one stage:
#
#   model qwen25_7b Qwen2.5-7B       the model block of its run file, and its Hugging Face folder below ./models
#   : "${TP:=4}" "${PP:=1}"          sizes; a variable that the environment sets wins
#   pretrain "$@"                    the stage: keys (or flags) of this script, then what the user adds, which wins
#
# Variables of the environment, besides those that a stage names below:
#   NNODES, NPUS_PER_NODE, HOSTS, SOCKET_IFNAME   size and network of the cluster
#   RAY_ADDRESS   a cluster that is up already (ray_cluster.sh): nothing is launched, the run joins it
#   DRY_RUN=1     print the command and check it (`mindspeed-rl explain` for runs), start nothing
set -euo pipefail

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
FAMILY="$(basename "$(dirname "${BASH_SOURCE[1]}")")"  # the folder of the script, which names the family's datasets

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# On an NPU machine the toolkit's environment must be there; envs/npu_a2 and envs/npu_a3 have it.
if [[ -z "${DRY_RUN:-}" && -z "${ASCEND_HOME_PATH:-}" && -e /dev/davinci_manager ]]; then
    fail "source envs/npu_a2/set_env.sh or envs/npu_a3/set_env.sh first"
fi

# model NAME FOLDER
model() {
    (( $# == 2 )) || fail "model takes NAME and FOLDER, not '$*'"
    MODEL="$1"
    MODEL_DIR="${MODEL_DIR:-./models/$2}"
    HF_FOLDER="./models/$2"
}

# positive NAME...: ends unless these variables hold whole numbers from 1.
positive() {
    local name
    for name in "$@"; do
        [[ "${!name:-}" =~ ^[1-9][0-9]*$ ]] || fail "$name must be a whole number from 1, not '${!name:-}'"
    done
}

_print() { printf '%q ' "$@"; printf '\n'; }

# _tool TOOL FLAGS...: runs a tool; a dry run prints the command and lets the tool check its flags.
_tool() {
    if [[ -n "${DRY_RUN:-}" ]]; then
        _print mindspeed-rl "$@"
        python "$EXAMPLES/check_arguments.py" "$@"
    else
        mindspeed-rl "$@"
    fi
}

# ---------------------------------------------------------------------------------------------------- runs: KEY=VALUE...

# _train RUN_FILE KEY=VALUE...: trains on NNODES nodes. RUN_FILE is one of examples/mcore/configs or of configs.
_train() {
    local run_file="$1"
    shift
    local run=(--config-name "$run_file" --nodes "$NNODES" "$@")
    [[ ! -f "$EXAMPLES/configs/$run_file.yaml" ]] || run=(--config-dir "$EXAMPLES/configs" "${run[@]}")
    local command=(mindspeed-rl train "${run[@]}")
    if (( NNODES > 1 )) && [[ -z "${RAY_ADDRESS:-}" ]]; then
        local cluster=(--nodes "$NNODES" --npus-per-node "$NPUS_PER_NODE")
        [[ -z "${HOSTS:-}" ]] || cluster+=(--hosts "$HOSTS")
        [[ -z "${SOCKET_IFNAME:-}" ]] || cluster+=(--socket-ifname "$SOCKET_IFNAME")
        command=(mindspeed-rl launch "${cluster[@]}" -- train "${run[@]}")
    fi
    if [[ -n "${DRY_RUN:-}" ]]; then
        _print "${command[@]}"
        mindspeed-rl explain "${run[@]}"
    else
        "${command[@]}"
    fi
}

# _parallel GROUP: fills PARALLEL_ARGS from TP and PP, and for experts from EP.
_parallel() {
    : "${PP:=1}"
    positive TP PP
    PARALLEL_ARGS=("$1.tensor_model_parallel_size=$TP" "$1.pipeline_model_parallel_size=$PP")
    if [[ -n "${EP:-}" ]]; then
        positive EP
        PARALLEL_ARGS+=("$1.expert_model_parallel_size=$EP" "$1.moe_tp_extend_ep=true")
    fi
}

# supervised RUN_FILE STAGE DATA KEY=VALUE...: one supervised stage. DATA is the prefix that data_convert_* wrote.
#   MODEL_DIR (tokenizer), DATA_PATH, LOAD_DIR (a Hugging Face folder or a Megatron checkpoint), SAVE_DIR
#   TP, PP, EP, MBS, GBS, SEQ_LENGTH, TRAIN_ITERS
#   NUM_LAYER_LIST (layers of each pipeline stage), NOOP_LAYERS (empty layers that make the pipeline even)
supervised() {
    local run_file="$1" stage="$2" data="$3"
    shift 3
    : "${NNODES:=1}" "${NPUS_PER_NODE:=8}" "${MBS:=1}" "${SEQ_LENGTH:=4096}"
    positive NNODES NPUS_PER_NODE MBS GBS SEQ_LENGTH TRAIN_ITERS
    _parallel megatron_training
    [[ -z "${NUM_LAYER_LIST:-}" ]] || PARALLEL_ARGS+=("megatron_training.num_layer_list='$NUM_LAYER_LIST'")
    [[ -z "${NOOP_LAYERS:-}" ]] || PARALLEL_ARGS+=("megatron_training.noop_layers='$NOOP_LAYERS'")
    local path_args=(
        megatron_training.data_path="${DATA_PATH:-./dataset/${FAMILY}_$data}"
        megatron_training.tokenizer_name_or_path="$MODEL_DIR"
        megatron_training.load="${LOAD_DIR:-$MODEL_DIR}"
        megatron_training.save="${SAVE_DIR:-./ckpt/${MODEL}_$stage}"
    )
    local batch_args=(
        megatron_training.seq_length="$SEQ_LENGTH"
        megatron_training.micro_batch_size="$MBS"
        megatron_training.global_batch_size="$GBS"
        megatron_training.train_iters="$TRAIN_ITERS"
    )
    _train "$run_file" megatron_training.model="$MODEL" megatron_training.num_npus="$(( NNODES * NPUS_PER_NODE ))" \
        "${PARALLEL_ARGS[@]}" "${path_args[@]}" "${batch_args[@]}" "$@"
}

pretrain() {
    : "${GBS:=256}" "${TRAIN_ITERS:=2000}"
    supervised pretrain pretrain pretrain/data_text_document "$@"
}

tune_full() {
    : "${GBS:=64}" "${TRAIN_ITERS:=2000}"
    supervised tune_full tune_full instruction/data "$@"
}

# Also LORA_R, LORA_ALPHA.
tune_lora() {
    : "${GBS:=64}" "${TRAIN_ITERS:=2000}"
    local lora_args=(megatron_training.lora_r="${LORA_R:-8}" megatron_training.lora_alpha="${LORA_ALPHA:-16}")
    supervised tune_lora tune_lora instruction/data "${lora_args[@]}" "$@"
}

# judge STAGE DATA KEY=VALUE...: preferences and reward models.
judge() {
    local stage="$1" data="$2"
    shift 2
    : "${GBS:=64}" "${TRAIN_ITERS:=1000}"
    supervised judge "$stage" "$data" megatron_training.stage="$stage" "$@"
}

# Also DPO_LOSS_TYPE, DPO_BETA, REF_MODEL (weights of the reference; empty: what LOAD_DIR holds).
dpo() {
    local dpo_args=(
        megatron_training.dpo_loss_type="${DPO_LOSS_TYPE:-sigmoid}"
        megatron_training.dpo_beta="${DPO_BETA:-0.1}"
        megatron_training.ref_model="${REF_MODEL:-}"
    )
    judge dpo pairwise/data "${dpo_args[@]}" "$@"
}

# Also SIMPO_BETA, GAMMA_BETA_RATIO.
simpo() {
    local simpo_args=(
        megatron_training.simpo_beta="${SIMPO_BETA:-2.5}"
        megatron_training.gamma_beta_ratio="${GAMMA_BETA_RATIO:-1.4}"
    )
    judge simpo pairwise/data "${simpo_args[@]}" "$@"
}

REWARD_MODEL_ARGS=(megatron_training.lr=1e-6 megatron_training.min_lr=1e-7)

outcome_reward_model() { judge orm pairwise/data "${REWARD_MODEL_ARGS[@]}" "$@"; }

# Also PLACEHOLDER_TOKEN and REWARD_TOKENS, as given to preprocessing.
process_reward_model() {
    local token_args=(
        "megatron_training.placeholder_token='${PLACEHOLDER_TOKEN:-ки}'"
        "megatron_training.reward_tokens=[${REWARD_TOKENS:-'+','-'}]"
    )
    judge prm process_reward/data "${REWARD_MODEL_ARGS[@]}" "${token_args[@]}" "$@"
}

# reinforce RUN_FILE KEY=VALUE...: reinforcement learning; the run file's name begins with the algorithm's.
#   MODEL_DIR (tokenizer), DATA_PATH, LOAD_DIR (a Hugging Face folder or a Megatron checkpoint), SAVE_DIR, TRAIN_ITERS
reinforce() {
    local run_file="$1"
    shift
    : "${NNODES:=1}" "${NPUS_PER_NODE:=16}" "${TRAIN_ITERS:=500}"
    positive NNODES NPUS_PER_NODE TRAIN_ITERS
    local run_args=(
        rl_config.actor_resource.num_npus="$(( NNODES * NPUS_PER_NODE ))"
        megatron_training.train_iters="$TRAIN_ITERS"
        megatron_training.data_path="${DATA_PATH:-./dataset/${FAMILY}_rl/data}"
        megatron_training.tokenizer_name_or_path="$MODEL_DIR"
        actor_config.load="${LOAD_DIR:-$MODEL_DIR}"
        actor_config.save="${SAVE_DIR:-./ckpt/${MODEL}_${run_file%%_*}}"
    )
    _train "$run_file" "${run_args[@]}" "$@"
}

# GRPO with examples/mcore/configs/grpo.yaml, for models that have no run file of their own.
#   Also TP, PP, EP, MBS, INFER_TP, GBS (prompts of one iteration), N_SAMPLES (responses to a prompt)
grpo() {
    : "${NPUS_PER_NODE:=8}" "${MBS:=1}" "${INFER_TP:=1}" "${GBS:=32}" "${N_SAMPLES:=8}"
    positive MBS INFER_TP GBS N_SAMPLES
    _parallel actor_config
    local batch_args=(
        actor_config.micro_batch_size="$MBS"
        megatron_training.global_batch_size="$GBS"
        rl_config.mini_batch_size="$GBS"
        rl_config.n_samples_per_prompt="$N_SAMPLES"
    )
    reinforce grpo megatron_training.model="$MODEL" actor_config.model="$MODEL" "${PARALLEL_ARGS[@]}" \
        generate_config.infer_tensor_parallel_size="$INFER_TP" "${batch_args[@]}" "$@"
}

# PPO: also CRITIC_LOAD_DIR, CRITIC_SAVE_DIR.
ppo() {
    local run_file="$1"
    shift
    local critic_args=(
        critic_config.load="${CRITIC_LOAD_DIR:-$MODEL_DIR}"
        critic_config.save="${CRITIC_SAVE_DIR:-./ckpt/${MODEL}_ppo_critic}"
    )
    reinforce "$run_file" "${critic_args[@]}" "$@"
}

# --------------------------------------------------------------------------------------- tools: FLAGS..., the tool's own

# Hugging Face weights to a Megatron checkpoint: LOAD_DIR, SAVE_DIR, TP, PP, EP, NUM_LAYER_LIST, NOOP_LAYERS.
hf2mcore() {
    : "${PP:=1}"
    positive TP PP
    local layout_args=(--target-tensor-parallel-size "$TP" --target-pipeline-parallel-size "$PP")
    if [[ -n "${EP:-}" ]]; then
        positive EP
        layout_args+=(--target-expert-parallel-size "$EP" --moe-grouped-gemm --moe-tp-extend-ep)
    fi
    [[ -z "${NUM_LAYER_LIST:-}" ]] || layout_args+=(--num-layer-list "$NUM_LAYER_LIST")
    [[ -z "${NOOP_LAYERS:-}" ]] || layout_args+=(--noop-layers "$NOOP_LAYERS")
    _tool convert --load-model-type hf --save-model-type mg --load-dir "${LOAD_DIR:-$HF_FOLDER}" \
        --save-dir "${SAVE_DIR:-./ckpt/${MODEL}_mcore}" "${layout_args[@]}" "$@"
}

# A Megatron checkpoint, under any split, to a Hugging Face folder: LOAD_DIR, SAVE_DIR, HF_DIR (config.json and tokenizer).
mcore2hf() {
    _tool convert --load-model-type mg --save-model-type hf --load-dir "${LOAD_DIR:-./ckpt/${MODEL}_mcore}" \
        --save-dir "${SAVE_DIR:-./ckpt/${MODEL}_hf}" --hf-cfg-dir "${HF_DIR:-$HF_FOLDER}" "$@"
}

# _inference TOOL FLAGS...: LOAD_DIR (a Hugging Face folder, a training checkpoint or a Megatron checkpoint),
# TOKENIZER_PATH, TP, MAX_NEW_TOKENS, TEMPERATURE.
_inference() {
    local tool="$1"
    shift
    : "${TP:=1}" "${MAX_NEW_TOKENS:=512}"
    positive TP MAX_NEW_TOKENS
    local model_args=(
        --load "${LOAD_DIR:-$HF_FOLDER}"
        --tokenizer-name-or-path "${TOKENIZER_PATH:-$HF_FOLDER}"
        --tensor-parallel-size "$TP"
    )
    local text_args=(--max-new-tokens "$MAX_NEW_TOKENS" --temperature "${TEMPERATURE:-0.7}")
    _tool "$tool" "${model_args[@]}" "${text_args[@]}" "$@"
}

chat() { _inference chat "$@"; }

# Also PROMPT.
generate() {
    _inference generate --prompt "${PROMPT:-Natalia sold 48 clips in April and half as many in May. How many in all?}" "$@"
}

# _preprocess KIND FILE FLAGS...: FILE below ./dataset to token files; INPUT, OUTPUT_PREFIX, TOKENIZER_PATH, WORKERS.
_preprocess() {
    local kind="$1" file="$2"
    shift 2
    : "${WORKERS:=8}"
    positive WORKERS
    _tool preprocess --input "${INPUT:-./dataset/$file}" --output-prefix "${OUTPUT_PREFIX:-./dataset/${FAMILY}_$kind/data}" \
        --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "$@"
}

pretrain_data() { _preprocess pretrain text.jsonl --handler-name GeneralPretrainHandler --append-eod "$@"; }

instruction_data() { _preprocess instruction alpaca.jsonl --handler-name AlpacaStyleInstructionHandler "$@"; }

pairwise_data() {
    _preprocess pairwise orca_rlhf.jsonl --handler-name AlpacaStylePairwiseHandler \
        --map-keys '{"prompt": "question", "query": "", "system": "system"}' "$@"
}

# Also PLACEHOLDER_TOKEN: one token, at the end of every step.
process_reward_data() {
    _preprocess process_reward math_shepherd.jsonl --handler-name AlpacaStyleProcessRewardHandler \
        --placeholder-token "${PLACEHOLDER_TOKEN:-ки}" --reward-tokens + - \
        --map-keys '{"prompt": "input", "response": "value"}' "$@"
}

rl_data() {
    _preprocess rl math_17k.parquet --handler-name Math17kAlpacaStyleInstructionHandler --prompt-type empty \
        --dataset-additional-keys labels "$@"
}

# Only prompts, for a reward model: the columns of descriptiveness, as MindSpeed-LLM's guide of Ray GRPO has them.
ppo_data() {
    _preprocess ppo descriptiveness-00000-of-00001.parquet --handler-name PPOAlpacaStyleInstructionHandler \
        --map-keys '{"prompt": "prompt", "query": "", "response": "prompt", "system": ""}' "$@"
}

# ------------------------------------------------------------------------------------------------ names of MindSpeed-LLM

# renamed SCRIPT ARGUMENTS...: the script of this folder, or FOLDER/SCRIPT, under the name that guides of MindSpeed-LLM have.
renamed() {
    local script="$1"
    shift
    [[ "$script" == */* ]] || script="$FAMILY/$script"
    exec bash "$EXAMPLES/$script" "$@"
}

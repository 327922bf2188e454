# Sourced by every script below examples/mcore. A script sets its variables, then calls supervised, reinforce,
# convert, preprocess, generate or chat once. Variables come from the environment when they are set there:
#   NNODES, NPUS_PER_NODE, HOSTS, SOCKET_IFNAME, MASTER_ADDR, NODE_RANK     size and network of the cluster
#   RAY_ADDRESS   a cluster that is up already (ray_cluster.sh): nothing is launched, the run joins it
#   DRY_RUN=1     print the command and check it (`mindspeed-rl explain` for runs), start nothing
set -euo pipefail

EXAMPLES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
NNODES="${NNODES:-1}"
NPUS_PER_NODE="${NPUS_PER_NODE:-8}"

# On an NPU machine the toolkit's environment must be there; envs/npu_a2 and envs/npu_a3 have it.
if [[ -z "${DRY_RUN:-}" && -z "${ASCEND_HOME_PATH:-}" && -e /dev/davinci_manager ]]; then
    echo "common.sh: source envs/npu_a2/set_env.sh or envs/npu_a3/set_env.sh first" >&2
    exit 1
fi

_print() { printf '%q ' "$@"; printf '\n'; }

# _tool COMMAND ARGUMENTS...: runs a tool; a dry run prints the command and lets the tool check its arguments.
_tool() {
    if [[ -n "${DRY_RUN:-}" ]]; then
        _print mindspeed-rl "$@"
        python "$EXAMPLES/check_arguments.py" "$@"
    else
        mindspeed-rl "$@"
    fi
}

# Each takes the tool's own flags.
convert() { _tool convert "$@"; }
preprocess() { _tool preprocess "$@"; }
generate() { _tool generate "$@"; }
chat() { _tool chat "$@"; }

# train RUN_FILE KEY=VALUE...: trains on NNODES nodes. RUN_FILE is one of examples/mcore/configs or of configs.
train() {
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

# Both take a run file and the keys that differ; keys given later win. What every script says is read from its variables:
# MODEL_DIR (tokenizer), DATA_PATH, LOAD_DIR and SAVE_DIR.

# supervised RUN_FILE KEY=VALUE...: pretraining, tuning, preferences, reward models; also TP, PP, MBS, GBS, SEQ_LENGTH, TRAIN_ITERS.
supervised() {
    local run_file="$1"
    shift
    train "$run_file" \
        megatron_training.num_npus="$(( NNODES * NPUS_PER_NODE ))" \
        megatron_training.tensor_model_parallel_size="$TP" \
        megatron_training.pipeline_model_parallel_size="$PP" \
        megatron_training.data_path="$DATA_PATH" \
        megatron_training.tokenizer_name_or_path="$MODEL_DIR" \
        megatron_training.seq_length="$SEQ_LENGTH" \
        megatron_training.micro_batch_size="$MBS" \
        megatron_training.global_batch_size="$GBS" \
        megatron_training.train_iters="$TRAIN_ITERS" \
        megatron_training.load="$LOAD_DIR" \
        megatron_training.save="$SAVE_DIR" \
        "$@"
}

# reinforce RUN_FILE KEY=VALUE...: reinforcement learning.
reinforce() {
    local run_file="$1"
    shift
    train "$run_file" \
        megatron_training.data_path="$DATA_PATH" \
        megatron_training.tokenizer_name_or_path="$MODEL_DIR" \
        actor_config.load="$LOAD_DIR" \
        actor_config.save="$SAVE_DIR" \
        "$@"
}

#!/usr/bin/env bash
# Llama 3.2 1B: a conversation on the console. LOAD_DIR is a Hugging Face folder, a training checkpoint or a Megatron checkpoint.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/Llama-3.2-1B}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/Llama-3.2-1B}"
TP="${TP:-1}"
MAX_NEW_TOKENS="${MAX_NEW_TOKENS:-512}"

MODEL_ARGS=(
    --load "$LOAD_DIR"
    --tokenizer-name-or-path "$TOKENIZER_PATH"
    --tensor-parallel-size "$TP"
)

TEXT_ARGS=(
    --prompt-type llama3
    --max-new-tokens "$MAX_NEW_TOKENS"
    --temperature "${TEMPERATURE:-0.7}"
)

chat "${MODEL_ARGS[@]}" "${TEXT_ARGS[@]}" "$@"

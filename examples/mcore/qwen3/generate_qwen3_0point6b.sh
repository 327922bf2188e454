#!/usr/bin/env bash
# Qwen3 0.6B: answers to prompts. LOAD_DIR is a Hugging Face folder, a training checkpoint or a Megatron checkpoint.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

LOAD_DIR="${LOAD_DIR:-./models/Qwen3-0.6B}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/Qwen3-0.6B}"
TP="${TP:-1}"
MAX_NEW_TOKENS="${MAX_NEW_TOKENS:-512}"
PROMPT="${PROMPT:-Natalia sold 48 clips in April and half as many in May. How many in all?}"

MODEL_ARGS=(
    --load "$LOAD_DIR"
    --tokenizer-name-or-path "$TOKENIZER_PATH"
    --tensor-parallel-size "$TP"
)

TEXT_ARGS=(
    --prompt-type qwen3
    --max-new-tokens "$MAX_NEW_TOKENS"
    --temperature "${TEMPERATURE:-0.7}"
    --prompt "$PROMPT"
)

generate "${MODEL_ARGS[@]}" "${TEXT_ARGS[@]}" "$@"

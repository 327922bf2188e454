#!/usr/bin/env bash
# Llama 3.2: solutions with a judgement of each step, for process reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

INPUT="${INPUT:-./dataset/math_shepherd.jsonl}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/llama32_process_reward/data}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/Llama-3.2-1B}"
WORKERS="${WORKERS:-8}"

HANDLER_ARGS=(
    --handler-name AlpacaStyleProcessRewardHandler
    --placeholder-token "${PLACEHOLDER_TOKEN:-ки}"  # one token, at the end of every step
    --reward-tokens + -
    --map-keys '{"prompt": "input", "response": "value"}'
)

preprocess --input "$INPUT" --output-prefix "$OUTPUT_PREFIX" --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "${HANDLER_ARGS[@]}"

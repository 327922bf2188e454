#!/usr/bin/env bash
# Llama 3.2: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

INPUT="${INPUT:-./dataset/alpaca.jsonl}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/llama32_instruction/data}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/Llama-3.2-1B}"
WORKERS="${WORKERS:-8}"

HANDLER_ARGS=(
    --handler-name AlpacaStyleInstructionHandler
    --prompt-type llama3
)

preprocess --input "$INPUT" --output-prefix "$OUTPUT_PREFIX" --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "${HANDLER_ARGS[@]}"

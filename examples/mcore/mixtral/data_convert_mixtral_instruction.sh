#!/usr/bin/env bash
# Mixtral: instructions and answers for supervised tuning.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

INPUT="${INPUT:-./dataset/alpaca.jsonl}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/mixtral_instruction/data}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/Mixtral-8x7B-v0.1}"
WORKERS="${WORKERS:-8}"

HANDLER_ARGS=(
    --handler-name AlpacaStyleInstructionHandler
    --prompt-type mixtral
)

preprocess --input "$INPUT" --output-prefix "$OUTPUT_PREFIX" --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "${HANDLER_ARGS[@]}"

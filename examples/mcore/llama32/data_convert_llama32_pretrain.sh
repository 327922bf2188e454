#!/usr/bin/env bash
# Llama 3.2: text for pretraining, an end token after each document.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

INPUT="${INPUT:-./dataset/text.jsonl}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/llama32_pretrain/data}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/Llama-3.2-1B}"
WORKERS="${WORKERS:-8}"

HANDLER_ARGS=(
    --handler-name GeneralPretrainHandler
    --append-eod
)

preprocess --input "$INPUT" --output-prefix "$OUTPUT_PREFIX" --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "${HANDLER_ARGS[@]}"

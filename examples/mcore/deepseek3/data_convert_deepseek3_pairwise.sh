#!/usr/bin/env bash
# DeepSeek-V3: preference pairs for DPO and reward models.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

INPUT="${INPUT:-./dataset/orca_rlhf.jsonl}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/deepseek3_pairwise/data}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/DeepSeek-V3}"
WORKERS="${WORKERS:-8}"

HANDLER_ARGS=(
    --handler-name AlpacaStylePairwiseHandler
    --prompt-type deepseek3
    --map-keys '{"prompt": "question", "query": "", "system": "system"}'
)

preprocess --input "$INPUT" --output-prefix "$OUTPUT_PREFIX" --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "${HANDLER_ARGS[@]}"

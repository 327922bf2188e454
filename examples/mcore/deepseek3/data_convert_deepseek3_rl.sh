#!/usr/bin/env bash
# DeepSeek-V3: prompts and reference answers for GRPO, DAPO and PPO.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

INPUT="${INPUT:-./dataset/math_17k.parquet}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/deepseek3_rl/data}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./models/DeepSeek-V3}"
WORKERS="${WORKERS:-8}"

HANDLER_ARGS=(
    --handler-name Math17kAlpacaStyleInstructionHandler
    --prompt-type empty
    --dataset-additional-keys labels
)

preprocess --input "$INPUT" --output-prefix "$OUTPUT_PREFIX" --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" --workers "$WORKERS" "${HANDLER_ARGS[@]}"

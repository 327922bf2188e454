#!/usr/bin/env bash
# Every supervised stage on the quickstart's task, on a laptop CPU: run examples/quickstart.sh first, or give a folder
# made by examples/quickstart/make_task.py in which an SFT run has been.
#   bash examples/supervised_stages.sh     results below runs/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/quickstart
python examples/quickstart/make_stage_data.py "$WORK"

COMMON=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$WORK/model")
mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/documents.jsonl" --output-prefix "$WORK/data/documents" \
    --handler-name GeneralPretrainHandler --json-keys text --append-eod
mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/pairs.jsonl" --output-prefix "$WORK/data/pairs" \
    --prompt-type hf --handler-name AlpacaStylePairwiseHandler
mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/steps.jsonl" --output-prefix "$WORK/data/steps" \
    --handler-name AlpacaStyleProcessRewardHandler --placeholder-token "#" --reward-tokens y n

for stage in pretrain dpo simpo orm prm; do
    echo "== $stage"
    mindspeed-rl train --config-name "${stage}_tiny_cpu" run_dir="$WORK/${stage}_run"
done

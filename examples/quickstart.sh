#!/usr/bin/env bash
# The whole story on a laptop CPU: install, make a task, preprocess, SFT, GRPO, compare. Two cores, no downloads of weights.
#   bash examples/quickstart.sh            results below runs/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/quickstart
rm -rf "$WORK"
mkdir -p "$WORK/data"

echo "== 1/5 task and model"
python examples/quickstart/make_task.py "$WORK"

echo "== 2/5 preprocessing"
COMMON=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$WORK/model" --prompt-type hf)
mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/sft.jsonl" --output-prefix "$WORK/data/sft" \
    --handler-name AlpacaStyleInstructionHandler >"$WORK/preprocess.log"
for split in train heldout; do
    mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/$split.jsonl" --output-prefix "$WORK/data/$split" \
        --handler-name R1AlpacaStyleInstructionHandler --dataset-additional-keys labels >>"$WORK/preprocess.log"
done
tail -n 1 "$WORK/preprocess.log"

echo "== 3/5 SFT: a warm start that knows the format and gets some sums right"
mindspeed-rl train --config-name sft_tiny_cpu run_dir="$WORK/sft_run" megatron_training.save_interval=10
python examples/quickstart/choose_start.py "$WORK/sft" "$WORK/raw/heldout.jsonl"

echo "== 4/5 GRPO: Megatron TP2 trains, two vLLM replicas sample"
mindspeed-rl train --config-name grpo_tiny_cpu run_dir="$WORK/grpo_run"

echo "== 5/5 the result, loaded by plain transformers"
python examples/quickstart/compare.py "$WORK/sft/hf/latest" "$WORK/grpo/hf/latest" "$WORK/raw/heldout.jsonl" "$WORK/grpo_run/report.json"
python examples/quickstart/plot_curve.py "$WORK/grpo_run" "$WORK/curve.svg"
echo "run folder: $WORK/grpo_run   model: $WORK/grpo/hf/latest   curve: $WORK/curve.svg"

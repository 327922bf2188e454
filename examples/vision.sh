#!/usr/bin/env bash
# Vision on a laptop CPU: a tiny Qwen2.5-VL learns from rewards which of two shapes in a picture it is to name the colour of.
# Nothing is downloaded but packages.
#   bash examples/vision.sh                results below runs/vision
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/vision
rm -rf "$WORK"
mkdir -p "$WORK/data"

echo "== 1/4 pictures and model"
python examples/vision/make_task.py "$WORK"
mindspeed-rl preprocess --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$WORK/model" --prompt-type hf \
    --input "$WORK/raw/sft.jsonl" --output-prefix "$WORK/data/sft" --handler-name OpenAIInstructionHandler >"$WORK/preprocess.log"

echo "== 2/4 SFT: tower and language model learn to see, and to name the colour of either shape"
mindspeed-rl train --config-name sft_tiny_vision_cpu run_dir="$WORK/sft_run"

echo "== 3/4 GRPO: Megatron TP2 trains, two vLLM replicas sample; prompts are read from raw rows"
mindspeed-rl train --config-name grpo_tiny_vision_cpu run_dir="$WORK/grpo_run"

echo "== 4/4 the result, loaded by plain transformers"
python examples/vision/compare.py "$WORK/sft/hf/latest" "$WORK/grpo/hf/latest" "$WORK/raw/heldout.jsonl" "$WORK/grpo_run/report.json"
python examples/quickstart/plot_curve.py "$WORK/grpo_run" "$WORK/curve.svg"
echo "run folder: $WORK/grpo_run   model: $WORK/grpo/hf/latest   curve: $WORK/curve.svg"

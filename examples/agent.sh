#!/usr/bin/env bash
# An agent on a laptop CPU: a tiny model learns to call a calculator for products that it cannot compute. Two cores, no downloads
# of weights.
#   bash examples/agent.sh                 results below runs/agent
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/agent
rm -rf "$WORK"
mkdir -p "$WORK/data"

echo "== 1/4 task and model"
python examples/agent/make_multiplications.py "$WORK"

echo "== 2/4 SFT: a model that calls now and then, and guesses otherwise"
mindspeed-rl preprocess --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$WORK/model" --prompt-type hf \
    --input "$WORK/raw/sft.jsonl" --output-prefix "$WORK/data/sft" --handler-name OpenAIInstructionHandler >"$WORK/preprocess.log"
mindspeed-rl train --config-name sft_tiny_cpu run_dir="$WORK/sft_run" megatron_training.data_path="$WORK/data/sft" \
    megatron_training.tokenizer_name_or_path="$WORK/model" megatron_training.load="$WORK/model" megatron_training.save="$WORK/sft" \
    megatron_training.train_iters=220 megatron_training.save_interval=220 megatron_training.log_interval=20

echo "== 3/4 GRPO: the model calls, the calculator answers, what the model wrote trains"
mindspeed-rl train --config-name grpo_tiny_agent_cpu run_dir="$WORK/grpo_run"

echo "== 4/4 the result, with the tool and without, played by plain transformers too"
python examples/agent/play.py "$WORK/sft/hf/latest" "$WORK/grpo/hf/latest" "$WORK/raw/heldout.jsonl" \
    "$WORK/grpo_run/report.json"
python examples/quickstart/plot_curve.py "$WORK/grpo_run" "$WORK/curve.svg"
echo "run folder: $WORK/grpo_run   model: $WORK/grpo/hf/latest   curve: $WORK/curve.svg"

#!/usr/bin/env bash
# An agent that repairs functions on a laptop CPU: it reads a file, runs its tests and edits it in a sandbox; the reward is that hidden
# tests pass. Two cores, no downloads of weights.
#   bash examples/swe_tiny.sh              results below runs/swe_tiny
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/swe_tiny
rm -rf "$WORK"
mkdir -p "$WORK/data"

echo "== 1/4 task and model"
python examples/swe_tiny/make_bugs.py "$WORK"

echo "== 2/4 SFT: a model that uses the tools, and mostly guesses the operator"
mindspeed-rl preprocess --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$WORK/model" --prompt-type hf \
    --input "$WORK/raw/sft.jsonl" --output-prefix "$WORK/data/sft" --handler-name OpenAIInstructionHandler >"$WORK/preprocess.log"
mindspeed-rl train --config-name sft_tiny_cpu run_dir="$WORK/sft_run" megatron_training.data_path="$WORK/data/sft" \
    megatron_training.tokenizer_name_or_path="$WORK/model" megatron_training.load="$WORK/model" megatron_training.save="$WORK/sft" \
    megatron_training.seq_length=128 megatron_training.train_iters="${SFT_ITERS:-150}" \
    megatron_training.save_interval="${SFT_ITERS:-150}" megatron_training.log_interval=10

echo "== 3/4 GRPO: the model repairs, the tests decide"
mindspeed-rl train --config-name grpo_tiny_swe_cpu run_dir="$WORK/grpo_run" megatron_training.train_iters="${GRPO_ITERS:-40}" \
    megatron_training.save_interval="${GRPO_ITERS:-40}"

echo "== 4/4 the share of samples whose hidden tests pass"
python examples/swe_tiny/show_passes.py "$WORK/grpo_run/metrics.jsonl"
echo "run folder: $WORK/grpo_run   model: $WORK/grpo/hf/latest   one sample: mindspeed-rl trace $WORK/grpo_run"

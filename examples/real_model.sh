#!/usr/bin/env bash
# GRPO of a real language model on two CPU cores: SmolLM2-135M-Instruct (Apache-2.0) learns to write sentences with an exact number
# of words. The model comes from a Python package of 93 MB; nothing is downloaded from a model hub.
#   bash examples/real_model.sh            results below runs/real_model
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/real_model
mkdir -p "$WORK"
DTYPE=float32
if grep -q -E 'avx512_bf16|amx_bf16' /proc/cpuinfo; then DTYPE=bfloat16; fi

echo "== 1/5 model and prompts"
bash examples/real_model/make_model.sh "$WORK"
python examples/real_model/make_prompts.py "$WORK"

OPTIONS=(--hf-chat-template --max-new-tokens 32 --dtype "$DTYPE")
TASK=(--task jsonl --task-data-path "$WORK/heldout.jsonl" --input-key question --label-key answer
    --scorer word_count --external-plugins examples/real_model/word_count.py)

echo "== 2/5 a question before"
mindspeed-rl generate --load "$WORK/model" "${OPTIONS[@]}" --prompt "What is the capital of France?"

echo "== 3/5 GRPO: 30 iterations of 8 prompts with 8 samples"
rm -rf "$WORK/grpo" "$WORK/grpo_run"
BF16=$([[ "$DTYPE" == bfloat16 ]] && echo true || echo false)
mindspeed-rl train --config-name examples/real_model/run.yaml megatron_training.bf16="$BF16" generate_config.dtype="$DTYPE" "$@"

echo "== 4/5 the result, by vLLM and by plain transformers"
mindspeed-rl evaluate --load "$WORK/grpo/hf/latest" "${OPTIONS[@]}" "${TASK[@]}"
python examples/real_model/compare.py "$WORK/model" "$WORK/grpo/hf/latest" "$WORK/heldout.jsonl" "$WORK/grpo_run" "$DTYPE"
python examples/quickstart/plot_curve.py "$WORK/grpo_run" "$WORK/curve.svg"

echo "== 5/5 what it has not forgotten"
mindspeed-rl generate --load "$WORK/grpo/hf/latest" "${OPTIONS[@]}" --prompt "What is the capital of France?"
echo "run folder: $WORK/grpo_run   model: $WORK/grpo/hf/latest   curve: $WORK/curve.svg"

#!/usr/bin/env bash
# The quickstart's task with a tiny Qwen3.5: three layers of linear attention (gated delta nets) to one of full attention.
# SFT in float32, then GRPO in bfloat16, the only format that vLLM's CPU kernel takes. Two cores, no downloads of weights.
#   bash examples/hybrid.sh                results below runs/hybrid
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/hybrid
rm -rf "$WORK"
mkdir -p "$WORK/data"

echo "== 1/4 task and model"
python examples/quickstart/make_task.py "$WORK" qwen3.5
COMMON=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$WORK/model" --prompt-type hf)
mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/sft.jsonl" --output-prefix "$WORK/data/sft" \
    --handler-name AlpacaStyleInstructionHandler >"$WORK/preprocess.log"
for split in train heldout; do
    mindspeed-rl preprocess "${COMMON[@]}" --input "$WORK/raw/$split.jsonl" --output-prefix "$WORK/data/$split" \
        --handler-name R1AlpacaStyleInstructionHandler --dataset-additional-keys labels >>"$WORK/preprocess.log"
done

# the model's shape comes from its config.json, not from the run files' model block
MODEL=(model.tiny_qwen25.num_layers=null megatron_training.tokenizer_name_or_path="$WORK/model")

echo "== 2/4 SFT: a warm start that knows the format and gets some sums right"
mindspeed-rl train --config-name sft_tiny_cpu run_dir="$WORK/sft_run" "${MODEL[@]}" megatron_training.save_interval=10 \
    megatron_training.data_path="$WORK/data/sft" megatron_training.load="$WORK/model" megatron_training.save="$WORK/sft"
python examples/quickstart/choose_start.py "$WORK/sft" "$WORK/raw/heldout.jsonl"

echo "== 3/4 GRPO: Megatron TP2 trains, two vLLM replicas sample"
mindspeed-rl train --config-name grpo_tiny_cpu run_dir="$WORK/grpo_run" "${MODEL[@]}" \
    megatron_training.data_path="$WORK/data/train" megatron_training.eval_data_path="$WORK/data/heldout" \
    actor_config.load="$WORK/sft" actor_config.save="$WORK/grpo" actor_config.bf16=true \
    generate_config.dtype=bfloat16 rl_config.log_probs_diff_limit=1.0

echo "== 4/4 the result, loaded by plain transformers"
python examples/quickstart/compare.py "$WORK/sft/hf/latest" "$WORK/grpo/hf/latest" "$WORK/raw/heldout.jsonl" "$WORK/grpo_run/report.json"
python examples/quickstart/plot_curve.py "$WORK/grpo_run" "$WORK/curve.svg"
echo "run folder: $WORK/grpo_run   model: $WORK/grpo/hf/latest   curve: $WORK/curve.svg"

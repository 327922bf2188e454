#!/usr/bin/env bash
# A real task on two CPU cores: SmolLM2-135M-Instruct (Apache-2.0) learns to write the facts of a sentence as a JSON object, by GRPO
# and, as a baseline, by supervised fine-tuning on the same sentences. Held-out sentences have other templates, names and cities.
#   bash examples/records.sh               seeds 1 2 3, half an hour each on two idle cores; results below runs/records
#   SEEDS=1 bash examples/records.sh       one seed; further arguments are keys of the GRPO runs
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/records
SEEDS="${SEEDS:-1 2 3}"
DTYPE=float32
if grep -q -E 'avx512_bf16|amx_bf16' /proc/cpuinfo; then DTYPE=bfloat16; fi
BF16=$([[ "$DTYPE" == bfloat16 ]] && echo true || echo false)

echo "== 1/4 model and data"
bash examples/real_model/make_model.sh "$WORK"
python examples/records/make_records.py "$WORK"

echo "== 2/4 supervised fine-tuning: 30 iterations of 8 sentences"
rm -rf "$WORK/sft" "$WORK/sft_run"
mindspeed-rl train --config-name examples/records/sft.yaml megatron_training.bf16="$BF16"

RUNS=()
for seed in $SEEDS; do
    echo "== 3/4 GRPO, seed $seed: 30 iterations of 8 prompts with 8 samples"
    rm -rf "$WORK/grpo_$seed" "$WORK/grpo_run_$seed"
    mindspeed-rl train --config-name examples/records/run.yaml megatron_training.bf16="$BF16" generate_config.dtype="$DTYPE" \
        megatron_training.seed="$seed" run_dir="$WORK/grpo_run_$seed" actor_config.save="$WORK/grpo_$seed" "$@"
    RUNS+=("$WORK/grpo_run_$seed=$WORK/grpo_$seed/hf/latest")
done

echo "== 4/4 the results, by plain transformers"
python examples/records/compare.py "$WORK" "$DTYPE" "${RUNS[@]}"
echo "table: $WORK/results.md   curve: $WORK/curve.svg   model: $WORK/grpo_${SEEDS##* }/hf/latest"

#!/usr/bin/env bash
# On-policy distillation on a laptop CPU: a tiny student, random at first, recovers a tiny teacher of another size.
#   bash examples/distill.sh               results below runs/distill
set -euo pipefail
cd "$(dirname "$0")/.."

bash envs/cpu/install.sh .venv
export PATH="$PWD/.venv/bin:$PATH"

WORK=runs/distill
rm -rf "$WORK"
mkdir -p "$WORK"

echo "== 1/3 teacher and student"
python examples/distill/make_models.py "$WORK"

echo "== 2/3 distillation: the student samples, the teacher judges every token"
mindspeed-rl explain --config-name distill_tiny_cpu | grep -E "^ *(distill|loss) "
mindspeed-rl train --config-name distill_tiny_cpu run_dir="$WORK/run"

echo "== 3/3 KL(student || teacher), by plain transformers; ends with an error above 0.01"
python examples/distill/compare.py "$WORK" "$WORK/student" "$WORK/save/hf/latest"

"""The band of each recipe's CPU twin: trains it with some seeds and writes recipes/NAME/cpu_curve.json.

python benchmarks/recipes.py maths dapo          # all without names; about a minute a seed on two idle cores
python benchmarks/recipes.py maths --seeds 1 2   # runs/recipe_seeds/NAME/seed_N that are there already are not trained again

The band of a window is the smallest and the largest mean of the seeds, each farther out by their distance, 0.05
at least; 0.1 farther out of a single seed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

from mindspeed_rl.cli.main import main as run
from mindspeed_rl.cli.recipe.record import CPU, TWIN_CURVE, Recipe, list_recipes, load_recipe
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.observability.expected_curve import ExpectedCurve, Window
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.run_files import read_lines

NUM_WINDOWS, MARGIN, MARGIN_OF_ONE = 4, 0.05, 0.1
#: metric of the band, where it is not the reward of the rollouts
METRICS = {
    "distillation": "distillation/divergence",
    "dapo": "dapo/score/mean",
    "ppo": "critic/score/mean",
    "sft_dpo": "train/loss",
}


def train(recipe: Recipe, seed: int, folder: Path) -> None:
    """Train all stages of a twin with a seed; nothing where that was done."""
    if (folder / "metrics.jsonl").exists():
        return
    twin = Path("runs/recipes") / recipe.name
    words = ["recipe", "run", recipe.name, f"megatron_training.seed={seed}"]
    for name in ("run", "run_sft", "result", "result_sft", "result_critic"):
        shutil.rmtree(twin / name, ignore_errors=True)
    here = Path.cwd()
    code = run(words)
    os.chdir(here)
    if code:
        raise SystemExit(code)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (twin / "run").rename(folder)


def measure(recipe: Recipe, folders: list[Path]) -> ExpectedCurve:
    """Compute the band of the last stage."""
    cfg = load_run_config(str(recipe.list_run_files(CPU)[-1]))
    length = cfg.actor_config.train_iters or cfg.megatron_training.train_iters
    assert length is not None
    metric = METRICS.get(recipe.name, "grpo/score/mean")
    size = length // NUM_WINDOWS
    histories = [History(read_lines(folder / "metrics.jsonl")) for folder in folders]
    windows = []
    for first in range(1, NUM_WINDOWS * size, size):
        last = first + size - 1
        series = [history.finite(metric) for history in histories]
        means = [statistics.fmean(y for x, y in zip(each.x, each.y) if first <= x <= last) for each in series]
        margin = max(MARGIN, max(means) - min(means)) if len(means) > 1 else MARGIN_OF_ONE
        windows.append(Window(first, last, round(min(means) - margin, 4), round(max(means) + margin, 4)))
    count = f"{len(folders)} seed{'s' if len(folders) > 1 else ''}"
    newest = max((folder / "metrics.jsonl").stat().st_mtime for folder in folders)
    day = datetime.date.fromtimestamp(newest)
    source = f"{count} of this run file on two CPU cores, {day}, python benchmarks/recipes.py {recipe.name}"
    return ExpectedCurve(metric, source, tuple(windows))


def main() -> int:
    parser = argparse.ArgumentParser(description="bands of the CPU twins of recipes")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe_seeds"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    for recipe in [load_recipe(name) for name in arguments.names] or list_recipes():
        folders = [(arguments.runs / recipe.name / f"seed_{seed}").absolute() for seed in arguments.seeds]
        for seed, folder in zip(arguments.seeds, folders):
            train(recipe, seed, folder)
        curve = measure(recipe, folders)
        (recipe.folder / TWIN_CURVE).write_text(json.dumps(curve.encode(), indent=2) + "\n")
        print(f"{recipe.name}: {', '.join(f'{window.low:g} to {window.high:g}' for window in curve.windows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Whether the quickstart's task is learned as well in every `trainer_mode`: held-out accuracy over several seeds.

    bash examples/quickstart.sh
    python benchmarks/learning_by_mode.py [--iterations 100] [--seeds 3]
    python benchmarks/learning_by_mode.py --modes sync --against generate_config.quantization=int8

All runs have one device that trains and a rollout server on another, the quickstart's keys, and a learning rate that decays to
the last iteration. A seed decides the prompts' order and what is sampled. Asynchronous runs weigh tokens by how much the
policy has moved since they were drawn (`rollout_importance_sampling_mode`), as docs/modes.md says.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rollout import MODES
from tiny_run import ROOT, train

WEIGHED = "rl_config.rollout_importance_sampling_mode=token_truncate"


@dataclass(frozen=True)
class Learned:
    """Held-out accuracy before and after, the mean age of a token in versions, the mean |log-prob| difference to the engine."""

    before: float
    after: float
    staleness: float
    difference: float


def learn(folder: Path, quickstart: Path, mode: str, seed: int, iterations: int, *changes: str) -> Learned:
    """One run."""
    keys: dict[str, Any] = {
        "megatron_training.seed": seed,
        "megatron_training.train_iters": iterations,
        "megatron_training.eval_interval": iterations,
        "megatron_training.tokenizer_name_or_path": quickstart / "model",
        "megatron_training.data_path": quickstart / "data/train",
        "megatron_training.eval_data_path": quickstart / "data/heldout",
        "actor_config.load": quickstart / "sft",
        "actor_config.save": "null",
        "actor_config.tensor_model_parallel_size": 1,
        "rl_config.actor_resource.num_npus": 1,
        "rl_config.use_integrated_worker": "false",
        "rl_config.rollout_resource.num_npus": 1,
        "rl_config.log_probs_diff_limit": "null",  # a server's tokens may be old
    }
    weighed = [] if mode == "sync" else [WEIGHED]
    run = train(folder, keys, *MODES[mode], *weighed, *changes, environment={"OMP_NUM_THREADS": "1"})
    staleness = statistics.mean(run.history.finite("rollout/staleness_mean").y or [0.0])
    accuracies = run.history.finite("eval/accuracy").y or [0.0]
    difference = statistics.mean(run.history.finite("rollout/log_probs_diff_mean").y or [0.0])
    return Learned(run.report["results"]["eval/accuracy/first"], accuracies[-1], staleness, difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--against", nargs="+", default=[], metavar="KEY=VALUE", help="each mode once more, with these keys")
    parser.add_argument("--quickstart", type=Path, default=ROOT / "runs/quickstart")
    options = parser.parse_args()
    variants = {mode: (mode, ()) for mode in options.modes}
    if options.against:
        variants |= {f"{mode}, {' '.join(options.against)}": (mode, tuple(options.against)) for mode in options.modes}
    found: dict[str, list[Learned]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, options.seeds + 1):
            for number, (name, (mode, changes)) in enumerate(variants.items()):
                run_folder = Path(folder, f"mode_{number}_seed_{seed}")
                found[name].append(learn(run_folder, options.quickstart.resolve(), mode, seed, options.iterations, *changes))
                print(f"{name}, seed {seed}: {found[name][-1]}", flush=True)
    print(f"\naccuracy on held-out prompts after {options.iterations} iterations")
    print("| mode, threshold | before | after, by seed | mean | mean staleness | mean log-prob difference |")
    print("|---|---|---|---|---|---|")
    for mode, runs in found.items():
        after = [one.after for one in runs]
        cells = [mode, f"{statistics.mean(one.before for one in runs):.1%}", " ".join(f"{each:.1%}" for each in after)]
        cells += [f"{statistics.mean(after):.1%}", f"{statistics.mean(one.staleness for one in runs):.2f}"]
        cells.append(f"{statistics.mean(one.difference for one in runs):.1e}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

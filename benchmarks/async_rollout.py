"""Seconds an iteration of `trainer_mode` sync, one_step_off and async, where a few responses are much longer than the others.

    python benchmarks/async_rollout.py [--iterations 12] [--mean 48] [--at-once 0] [--rounds 2] [--layers 6] [--hidden 256]
        [--modes sync "async, 1"] [--lengths sampled]

Two processes: a worker that trains and a rollout server, one core each; in the modes of `SHARED` two workers that generate
and train in turn. An agent loop draws how long a response gets: lognormal lengths, the same for the same sample in every
mode, with a tail of up to ten mean lengths; half of their variance comes from the prompt, and an epoch has three iterations.
Synchronous runs first find how many responses the engine generates at once (`max_num_seqs`), and how many passes the trainer
makes over the rows (`rl_config.epochs`), so that a rollout is about half of an iteration. The modes run in turn, and again
for each round. What a side idles is taken from timeline.json: an engine where no interval `generate` of the server is, a
trainer where it waits in `rollout`. Iterations before the third do not count. The model has random weights, which is all that
seconds ask for.

With `--lengths sampled` a response ends where the end token is sampled, whose probability the model makes 1 in `--mean`:
lengths are geometric. Only so can all methods be compared: partial rollouts take no agent loop.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from headline import Headline
from tiny_run import make_model, make_task, train

from mindspeed_rl.observability.run_files import RunFiles

WARM_UP = 2
PROMPTS, GROUP = 16, 8
#: mean lengths that no response exceeds
LONGEST = 10

LOOP = """
import dataclasses, math, os, random, zlib

from mindspeed_rl.rollout.agents.loop import SingleTurn

MEAN, LONGEST, SPREAD = int(os.environ["LENGTH_MEAN"]), int(os.environ["LENGTH_LONGEST"]), 1.0
HALF = SPREAD / math.sqrt(2)  # half of the variance comes from the prompt


class DrawnLengths(SingleTurn):
    '''A response has as many tokens as its seed says, whatever it holds.'''

    async def run(self, task, engine, tools):
        prompt = random.Random(zlib.crc32(repr(task.prompt_ids).encode())).gauss(0.0, HALF)
        drawn = random.Random(task.seed).lognormvariate(math.log(MEAN) + prompt - SPREAD**2 / 2, HALF)
        sampling = dataclasses.replace(task.sampling, max_tokens=max(1, min(round(drawn), LONGEST)), stop_token_ids=())
        return await super().run(dataclasses.replace(task, sampling=sampling), engine, tools)
"""

MODES: dict[str, list[str]] = {
    "sync": ["rl_config.trainer_mode=sync"],
    "sync, longest first": ["rl_config.trainer_mode=sync", "rl_config.longest_first=true"],
    "one_step_off": ["rl_config.trainer_mode=one_step_off"],
    "async, 1": ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1"],
    "async, 1, 2 spare samples": [
        "rl_config.trainer_mode=async",
        "rl_config.max_off_policy_threshold=1",
        "rl_config.spare_samples_per_prompt=2",
    ],
    "async, 0, 2 spare samples": [
        "rl_config.trainer_mode=async",
        "rl_config.max_off_policy_threshold=0",
        "rl_config.spare_samples_per_prompt=2",
    ],
    "async, 2": ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=2"],
    "async, 1, 2 spare samples kept": [
        "rl_config.trainer_mode=async",
        "rl_config.max_off_policy_threshold=1",
        "rl_config.spare_samples_per_prompt=2",
        "rl_config.keep_spare_samples=true",
    ],
}
_SPLIT = ["rl_config.partial_rollout_max_split=8", "rl_config.over_sample_rate=1"]
#: modes in which both devices generate and train in turn
SHARED: dict[str, list[str]] = {
    "sync on both": [],
    "split 8 on both": _SPLIT,
    "split 8 on both, 2 spare samples": [*_SPLIT, "rl_config.spare_samples_per_prompt=2"],
    "split 8 on both, 2 spare samples kept": [
        *_SPLIT,
        "rl_config.spare_samples_per_prompt=2",
        "rl_config.keep_spare_samples=true",
    ],
}


@dataclass(frozen=True)
class Measured:
    """Medians over iterations, in seconds; what each side idles, of the time; mean age and number of the tokens that train."""

    iteration_s: float
    rollout_s: float
    training_s: float
    trainer_idles: float
    engine_idles: float
    staleness: float
    tokens: float


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    folder: Path
    model: Path
    data: Path
    iterations: int
    mean: int
    samples_lengths: bool = False

    def halves(self) -> tuple[int, int]:
        """Responses at once, and passes, with which a rollout takes about as long as the rest of a synchronous iteration."""
        at_once = PROMPTS * GROUP
        while True:
            found = self.run(f"with_{at_once}", "sync", at_once, 1)
            print(f"{at_once} at once: rollout {found.rollout_s:.2f} s, the rest {found.training_s:.2f} s", flush=True)
            if found.rollout_s >= 0.8 * found.training_s or at_once == 1:
                return at_once, max(1, round(found.rollout_s / found.training_s))
            at_once //= 2

    def run(self, name: str, mode: str, at_once: int, epochs: int) -> Measured:
        """One run of this mode."""
        folder = self.folder / name
        longest = self.mean * LONGEST
        (self.folder / "drawn_lengths.py").write_text(LOOP)
        keys: dict[str, Any] = {
            "megatron_training.train_iters": self.iterations,
            "megatron_training.tokenizer_name_or_path": self.model,
            "megatron_training.data_path": self.data,
            "megatron_training.eval_data_path": "null",
            "megatron_training.global_batch_size": PROMPTS,
            "megatron_training.seq_length": longest + 32,
            "actor_config.load": self.model,
            "actor_config.save": "null",
            "actor_config.tensor_model_parallel_size": 1,
            "actor_config.micro_batch_size": 16,
            "rl_config.actor_resource.num_npus": 1,
            "rl_config.n_samples_per_prompt": GROUP,
            "rl_config.mini_batch_size": PROMPTS,
            "rl_config.init_kl_coef": 0.0,
            "rl_config.epochs": epochs,
            "rl_config.rollout_importance_sampling_mode": "token_truncate",
            "rl_config.guarantee_order": "false",
            "generate_config.max_num_seqs": at_once,
            "generate_config.max_model_len": longest + 32,
            "generate_config.sampling_config.max_tokens": longest,
        }
        if mode in SHARED:
            keys |= {"rl_config.actor_resource.num_npus": 2}
        else:
            keys |= {"rl_config.use_integrated_worker": "false", "rl_config.rollout_resource.num_npus": 1}
        if not self.samples_lengths:
            keys |= {"rl_config.agent_loop": "drawn_lengths:DrawnLengths"}
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])),
            "LENGTH_MEAN": str(self.mean),
            "LENGTH_LONGEST": str(longest),
        }
        return _measured(train(folder, keys, *(MODES | SHARED)[mode], environment=environment))


def _end_after(folder: Path, mean: int) -> None:
    """Give the end token a probability of 1 / mean after every token: its row reads a part that all embeddings share."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
        ends, others = model.get_output_embeddings().weight[model.config.eos_token_id], model.config.vocab_size - 1
        ends.fill_(math.log(others / (mean - 1)) / model.config.hidden_size)
    model.save_pretrained(folder)


def _measured(run: RunFiles) -> Measured:
    spans = [event for event in run.events if event["ph"] == "X"]
    counted = [event for event in spans if event["args"]["iteration"] > WARM_UP]
    begin, end = min(event["ts"] for event in counted), max(event["ts"] + event["dur"] for event in counted)
    busy = _covered([(event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"] == "generate"], begin, end)
    iteration_s, rollout_s = (
        statistics.median(run.history.series[f"timing/{name}"].y[WARM_UP:]) for name in ("all", "rollout")
    )
    return Measured(
        iteration_s=iteration_s,
        rollout_s=rollout_s,
        training_s=iteration_s - rollout_s,
        trainer_idles=rollout_s / iteration_s,
        engine_idles=1.0 - busy / (end - begin),
        staleness=statistics.mean(run.history.finite("rollout/staleness_mean").y[WARM_UP:] or [0.0]),
        tokens=statistics.mean(run.history.series["rollout/tokens"].y[WARM_UP:]),
    )


def _covered(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time between begin and end is in at least one interval."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        total += max(0.0, min(stop, end) - max(start, reached))
        reached = max(reached, min(stop, end))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--mean", type=int, default=48, help="mean length of a response in tokens")
    parser.add_argument("--at-once", type=int, default=0, help="responses in the engine; 0: as many as make both halves equal")
    every = [*MODES, *SHARED]
    parser.add_argument("--modes", nargs="+", choices=every, default=list(MODES), help="all are compared with the first")
    parser.add_argument(
        "--lengths", choices=("drawn", "sampled"), default="drawn", help="by an agent loop, or by the end token"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(Path(folder, "task"))
        shape = {"num_hidden_layers": options.layers, "hidden_size": options.hidden, "intermediate_size": 3 * options.hidden}
        shape |= {"tie_word_embeddings": options.lengths == "drawn"}
        model = make_model(task, Path(folder, "model"), {**shape, "max_position_embeddings": options.mean * LONGEST + 32})
        if options.lengths == "sampled":
            _end_after(model, options.mean)
        data = Path(folder, "train.jsonl")  # every third iteration meets the same prompts
        data.write_text("".join((task / "raw/train.jsonl").read_text().splitlines(keepends=True)[: 3 * PROMPTS]))
        bench = Bench(Path(folder), model, data, options.iterations, options.mean, options.lengths == "sampled")
        at_once, epochs = (options.at_once, 1) if options.at_once else bench.halves()
        found: dict[str, list[Measured]] = {mode: [] for mode in options.modes}
        for number in range(options.rounds):
            for mode in options.modes:
                name = "".join(char if char.isalnum() else "_" for char in f"{mode}_{number}")
                found[mode].append(bench.run(name, mode, at_once, epochs))
                print(f"{mode}: {found[mode][-1]}", flush=True)
    first = options.modes[0]
    baseline = statistics.mean(one.iteration_s for one in found[first])
    lengths = f"{options.mean} tokens on average and {options.mean * LONGEST} at most"
    print(
        f"\n{options.layers} x {options.hidden}, {PROMPTS * GROUP} responses of {lengths}, {at_once} at once, {epochs} passes"
    )
    columns = f"mode, threshold | s an iteration | times {first} | trainer waits | engine idles | mean staleness"
    print(f"| {columns} | tokens trained | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for mode, runs in found.items():
        seconds = [one.iteration_s for one in runs]
        waits, idles, staleness = (
            statistics.mean(getattr(one, name) for one in runs) for name in ("trainer_idles", "engine_idles", "staleness")
        )
        cells = [mode, " ".join(f"{each:.2f}" for each in seconds), f"{baseline / statistics.mean(seconds):.2f}"]
        tokens = statistics.mean(one.tokens for one in runs)
        idle = "-" if mode in SHARED else f"{idles:.0%}"  # workers in turn have no intervals of their own for it
        cells += [f"{waits:.0%}", idle, f"{staleness:.2f}", f"{tokens:.0f}", f"{tokens / statistics.mean(seconds):.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    for mode, runs in found.items():
        if mode != first:
            ours = statistics.mean(one.iteration_s for one in runs)
            what = f"an iteration with a long tail of lengths, {mode}, s"
            Headline(what, f"{ours:.2f}", first, f"{baseline:.2f}", baseline / ours).say()


if __name__ == "__main__":
    main()

"""How fast mathematical answers are scored: the reward pool beside math-verify called in a plain loop, and where the time goes.

    python benchmarks/rewards.py                    10,000 answers of each kind, 2 workers
    python benchmarks/rewards.py --answers 1000 --workers 4 --profile

The responses are made up: a page of reasoning and a boxed answer, half of them right. "numbers" are integers, decimals,
fractions and percentages, as in GSM8K. "contest" draws from the table of contest answers of the tests (roots, intervals,
sets, matrices, words; a third are numbers) with other digits, so that hardly any two are the same. Wrong answers are other
labels, or the label with other digits, so that symbolic comparison has to refute them. On a busy
machine the CPU time says more than the clock.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headline import Headline

from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings

_CONTEST = Path(__file__).resolve().parents[1] / "tests" / "unit" / "rewards" / "contest_answers.json"
_REASONING = (
    "We let $x$ be the number that we look for and write the condition as $2x + 3 = {n}$. Subtracting $3$ gives "
    "$2x = {n} - 3$, and therefore $x = \\frac{{{n} - 3}}{{2}}$. Checking the other case, $x^2 - {n}x + 1 = 0$ "
    "has no integer solution.\n\n"
)
_PARAGRAPHS = 6


def numbers(rng: random.Random) -> str:
    """Return an answer as GSM8K and its like have them."""
    kind = rng.random()
    if kind < 0.7:
        return str(rng.randrange(-50, 2000))
    if kind < 0.85:
        return f"{rng.randrange(1, 500) / 4:g}"
    if kind < 0.95:
        return f"\\frac{{{rng.randrange(1, 40)}}}{{{rng.randrange(2, 40)}}}"
    return f"{rng.randrange(1, 100)}\\%"


def contest() -> Callable[[random.Random], str]:
    """Return a function that draws a contest answer."""
    table = json.loads(_CONTEST.read_text(encoding="utf-8"))
    return lambda rng: other_digits(rng, rng.choice(table))


def other_digits(rng: random.Random, answer: str) -> str:
    """Return the answer with every digit replaced by one from 2 to 9."""
    return re.sub(r"\d", lambda _: str(rng.randrange(2, 10)), answer)


def make_samples(count: int, draw: Callable[[random.Random], str], seed: int = 0) -> list[RewardSample]:
    """Return responses: half hold their label, a quarter the label with other digits, a quarter another answer."""
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        label = draw(rng)
        answer = label if index % 2 else other_digits(rng, label) if index % 4 else draw(rng)
        text = _REASONING.format(n=index) * _PARAGRAPHS + f"So the answer is $\\boxed{{{answer}}}$."
        samples.append(RewardSample(prompt="How many?", response=text, response_ids=list(range(400)), label=label))
    return samples


def plain_loop(samples: Sequence[RewardSample]) -> tuple[float, float]:
    """Return wall and CPU seconds of math-verify as its documentation shows it: parse, parse, verify, one after the other."""
    from math_verify import parse, verify

    start, cpu_start = time.perf_counter(), time.process_time()
    for sample in samples:
        verify(parse(f"${sample.label}$"), parse(sample.response))
    return time.perf_counter() - start, time.process_time() - cpu_start


def pooled(name: str, samples: Sequence[RewardSample], workers: int) -> tuple[float, float]:
    """Return wall seconds from submitting to having all results, and CPU seconds of all processes from start to end."""
    cpu_start = cpu_seconds()
    with RewardPool([name], settings=RewardSettings(num_reward_workers=workers, reward_failure_limit=1.0)) as pool:
        pool.score(samples[: 4 * workers])
        start = time.perf_counter()
        results = pool.score(samples)
        seconds = time.perf_counter() - start
    failed = sum(result.failed for result in results)
    if failed:
        print(f"  ({failed} samples failed)")
    return seconds, cpu_seconds() - cpu_start


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all its descendants that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def profile(samples: Sequence[RewardSample]) -> None:
    """Print where the scorer `acc` spends its time, in this process."""
    from mindspeed_rl.rewards.math_scores import acc

    profiler = cProfile.Profile()
    profiler.enable()
    for sample in samples:
        acc(sample.response, sample.label)
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("cumulative").print_stats(
        r"scores.py|grading.py|answers.py|parser.py|grader.py|latex2sympy|simplify.py|ParserATNSimulator|numbers.py", 18
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--answers", type=int, default=10_000)
    arguments.add_argument("--loop-answers", type=int, default=1000, help="answers given to the plain loop, which is slow")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--profile", action="store_true")
    given = arguments.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, {given.workers} workers")
    for kind, draw in (("numbers", numbers), ("contest", contest())):
        samples = make_samples(given.answers, draw)
        loop_samples = samples[: given.loop_answers]
        rows = [("math-verify in a plain loop", plain_loop(loop_samples), len(loop_samples))]
        for name in ("acc", "math_17k_acc", "accuracy"):
            rows.append((f"pool, {name}", pooled(name, samples, given.workers), len(samples)))
        for label, (seconds, cpu), count in rows:
            rate, cpu_ms = 60 * count / seconds, 1000 * cpu / count
            print(f"{kind:8} {label:28} {rate:10,.0f} answers a minute  {cpu_ms:7.2f} CPU ms an answer")
        ours, loop = (60 * count / seconds for _, (seconds, _), count in (rows[1], rows[0]))
        what = f"scoring {kind} by `acc`, {given.workers} workers, answers a minute"
        Headline(what, f"{ours:,.0f}", "math-verify in a loop", f"{loop:,.0f}", ours / loop).say()
        if given.profile:
            profile(samples[: given.loop_answers])


if __name__ == "__main__":
    main()

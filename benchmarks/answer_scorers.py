"""Accuracy and speed of `acc`, math-verify and the scorers of verl and ms-swift, on the same labels and answers.

    pip download --no-deps verl==0.9.1 ms-swift==4.6.0 pylatexenc==2.11 -d wheels
    python benchmarks/answer_scorers.py --wheels wheels

Labels of every type, with equivalent and wrong answers, come from the tests (`tests/unit/rewards/answer_cases.py`). The table
has false accepts (a wrong answer is rewarded), false refusals (a right one is not) and answers a second of one process. The
scorers of other projects are read from their wheels, unpacked into a temporary folder; of ms-swift only `rewards/orm.py` is
imported, with a stand-in for its import of the inference engine, which the scorer does not use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import platform
import signal
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headline import Headline

_TESTS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "rewards"
_RESPONSE = "Adding both sides and dividing, we get the result. So the answer is $\\boxed{{{answer}}}$."
_LIMIT_S = 20

Scorer = Callable[[str, str], bool]


def ours() -> Scorer:
    from mindspeed_rl.rewards.math_scores import acc

    return lambda response, label: acc(response, label) == 1.0


def math_verify() -> Scorer:
    """Return math-verify as its documentation shows it."""
    from math_verify import parse, verify

    return lambda response, label: bool(verify(parse(f"\\boxed{{{label}}}"), parse(response)))


def verl(module: str) -> Scorer:
    """Return a scorer of verl's `reward_score`."""
    scorer = importlib.import_module(f"verl.utils.reward_score.{module}")
    if module == "math_verify":  # without its pool, whose processes would be counted as speed
        return lambda response, label: scorer._verify_in_subprocess(f"\\boxed{{{label}}}", response) == 1.0

    def score(response: str, label: str) -> bool:
        result = scorer.compute_score(response, label)
        result = result["acc"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
        return float(result) == 1.0

    return score


def swift() -> Scorer:
    """Return ms-swift's `accuracy`; its label is a solution, in which the answer is in dollar signs."""
    accuracy = importlib.import_module("swift.rewards.orm").MathAccuracy()
    return lambda response, label: accuracy([response], [f"${label}$"]) == [1.0]


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack all wheels, and make the packages importable without their `__init__`, which imports far more than a scorer."""
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.insert(0, str(folder))
    for name in ("verl", "verl.utils", "swift", "swift.rewards"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    engine = types.ModuleType("swift.infer_engine")
    engine.InferRequest = object
    sys.modules["swift.infer_engine"] = engine


def pairs(per_kind: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (label, right answer) and (label, wrong answer) pairs."""
    sys.path.insert(0, str(_TESTS))
    from answer_cases import make_cases, mutate

    cases = make_cases(per_kind, seed=7)
    right = [(case.label, answer) for case in cases for _, answer in (("", case.label), *case.right)]
    return right, [(case.label, answer) for case in cases for _, answer in (*case.wrong, *mutate(case.label))]


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def run(scorer: Scorer, rows: Sequence[tuple[str, str]]) -> tuple[int, int, float]:
    """Return how many answers were accepted, how many raised or took too long, and the seconds of processor time."""
    accepted = failed = 0
    start = time.process_time()
    for label, answer in rows:
        try:
            with time_limit(), contextlib.redirect_stdout(io.StringIO()):
                accepted += scorer(_RESPONSE.format(answer=answer), label)
        except BaseException as error:  # whatever leaves a scorer is counted
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
    return accepted, failed, time.process_time() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--wheels", type=Path, help="folder with the wheels; without it only ours and math-verify run")
    arguments.add_argument("--per-kind", type=int, default=3, help="labels of each type")
    arguments.add_argument("--only", nargs="+", default=[], help="words in the names of the scorers to run; all without it")
    given = arguments.parse_args()
    makers: dict[str, Callable[[], Scorer]] = {"acc": ours, "math-verify": math_verify}
    with tempfile.TemporaryDirectory() as folder:
        if given.wheels is not None:
            unpack(given.wheels, Path(folder))
            makers |= {
                "verl `math_reward`": lambda: verl("math_reward"),
                "verl `math_verify`": lambda: verl("math_verify"),
                "verl `prime_math`": lambda: verl("prime_math"),
                "ms-swift `accuracy`": swift,
            }
        right, wrong = pairs(given.per_kind)
        print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
        print(f"{len(right)} right answers, {len(wrong)} wrong ones\n")
        print(
            "| scorer | false accepts | false refusals | raised or over 20 s | answers per CPU second |\n|---|---|---|---|---|"
        )
        speeds = {}
        for name, make in makers.items():
            if given.only and not any(word in name for word in given.only):
                continue
            scorer = make()
            scorer(_RESPONSE.format(answer="\\frac{1}{2}"), "0.5")  # tables of parsers are built once
            found, failed, seconds = run(scorer, right)
            accepted, failed_too, more_seconds = run(scorer, wrong)
            speeds[name] = (len(right) + len(wrong)) / (seconds + more_seconds)
            shares = f"{accepted} ({accepted / len(wrong):.1%}) | {len(right) - found} ({1 - found / len(right):.1%})"
            print(f"| {name} | {shares} | {failed + failed_too} | {speeds[name]:,.0f} |", flush=True)
        if not {"acc", "math-verify"} <= speeds.keys():
            return
        ratio = speeds["acc"] / speeds["math-verify"]
        what = "answers of every type, scored per second of processor time"
        Headline(what, f"{speeds['acc']:,.0f}", "math-verify", f"{speeds['math-verify']:,.0f}", ratio).say()


if __name__ == "__main__":
    main()

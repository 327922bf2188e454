"""Ingredients of a run with one another: every pair that the rules allow is in a whole run that equals its reference.

`.venv/bin/python tests/product_matrix.py` prints the matrix. `--all` makes a fifth of the runs of `product_compared.json`,
which have equalled their reference before, and `--extra` the others. `PRODUCT_ALL=1` makes runs for all pairs,
`PRODUCT_NEW=1` for those that no run of the file has; `PRODUCT_RUN=N,M` makes these of them, `PRODUCT_NAMES=lora+partial,remax`
runs of these ingredients, `PRODUCT_SEED=N` draws other losses and other sets of ingredients, and `PRODUCT_RECORD=1` adds what
is equal to the file, with the day.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import product_jobs as jobs
import product_judges
import pytest
import torch
from product_runs import (
    BY_NAME,
    SILENT,
    Compared,
    ProductRun,
    Rules,
    cover,
    find_last_day,
    list_pairs,
    make_folders,
    plain_objective,
    random_objective,
    read_comparisons,
    record_comparison,
)
from ranks import RankFailureError, Ranks
from slow_product import Comparison, InconclusiveError, measure_force
from slow_reference import Margins, SlowModel

from mindspeed_rl.config import ConfigError

KIND = "rollout"
_SEED = int(os.environ.get("PRODUCT_SEED", "1"))
#: `--all` repeats one of so many of the runs that have been compared, `--extra` the others
_ONE_OF = 5
#: draws of a run, of which one is to show something
_DRAWS = 8
#: characters of an error, or of the end of a rank's traceback
_MOST_OF_AN_ERROR = 2500
Folders = Mapping[str, Mapping[str, str]]

#: seed and ingredients of a few runs, of which the default suite makes the runs of one process
_SOME = {
    "a student with tied weights": (8, ("distillation", "tied")),
    "a reference that follows, filtered groups": (5, ("filtered", "sync_ref")),
    "prediction layers": (3, ("prediction",)),
    "Muon of experts under tensor parallelism with drafts": (9, ("muon", "experts", "tensor", "drafts", "sync_ref")),
    "distilled agents in a pipeline": (8, ("distillation", "agents", "pipeline", "tied", "curriculum")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    with product_judges.serve() as judges:
        yield make_folders(tmp_path_factory.mktemp("models"), judges)


def build(names: frozenset[str], seed: int, folders: Folders, folder: Path) -> ProductRun:
    """The run of these ingredients with a loss that is drawn; the plain one where the rules refuse many others."""
    for attempt in range(20):
        objective = random_objective(seed + 1000 * attempt, names) if attempt < 19 else plain_objective()
        run = ProductRun(names, seed, objective)
        run.build(folders, folder)
        try:
            run.resolve()
        except ConfigError:
            continue
        run.write(folder)
        return run
    raise AssertionError(f"the rules refuse {sorted(names)}")


def compare(names: frozenset[str], seed: int, ranks: Callable[[int], Ranks], folders: Folders, folder: Path) -> list[str]:
    """Compare a run of these ingredients with its reference; return what could not be compared.

    Raises:
        InconclusiveError: no draw shows anything.
    """
    reasons = []
    for draw in range(_DRAWS):
        path = folder / str(draw)
        try:
            return compare_run(build(names, seed + 100_000 * draw, folders, path), ranks, folders, path)
        except InconclusiveError as error:
            reasons.append(str(error))
            print(f"draw {draw} of {', '.join(sorted(names))} shows nothing: {error}")
    raise InconclusiveError(f"no draw shows anything: {reasons}")


def compare_run(run: ProductRun, ranks: Callable[[int], Ranks], folders: Folders, folder: Path) -> list[str]:
    """Make the run, and compare it with its reference; return what could not be compared.

    Raises:
        InconclusiveError: another run of these ingredients is needed.
    """
    comparison = Comparison(run, folders[run.model])
    group = ranks(run.size)

    def train(name: str, **more: Any) -> list[dict[str, Any]]:
        return group.run(jobs.run, path=run.path, folder=str(folder / name), timeout_s=240, **more)

    if "resumed" in run.names:
        reports = train("first", stops_after=1)
        comparison.check(reports)
        later = train("second")
        assert later[0]["start"] == 1
        comparison.check(later)
        reports = [reports[0] | {"records": reports[0]["records"] + later[0]["records"]}, *reports[1:]]
    else:
        reports = train("run")
        comparison.check(reports)
    comparison.check_that_it_shows()
    if silent := run.names & SILENT:
        plain = build_without(run, silent, folders, folder / "silent")
        others = group.run(jobs.run, path=plain.path, folder=str(folder / "silent"), timeout_s=240)
        _check_equal(reports, others, f"{' and '.join(sorted(silent))} change the run")
    if "drafts" in run.names:
        plain = build_without(run, frozenset(("drafts",)), folders, folder / "without")
        others = group.run(jobs.run, path=plain.path, folder=str(folder / "without"), timeout_s=240)
        for ours, theirs in zip(_first(reports), _first(others), strict=True):
            assert np.array_equal(ours, theirs), "drafts change the responses"
    return comparison.notes


def build_without(run: ProductRun, names: frozenset[str], folders: Folders, folder: Path) -> ProductRun:
    """The same run, and the same loss, without some ingredients."""
    other = dataclasses.replace(run, names=run.names - names, keys={}, written={}, path="")
    other.build(folders, folder)
    other.resolve()
    other.write(folder)
    return other


def _check_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], text: str) -> None:
    """Responses and weights of all iterations have the same bits; drafts of a rollout are counted alike."""
    pairs = [[record for record in reports[0]["records"] if "columns" in record] for reports in (ours, theirs)]
    for number, (one, other) in enumerate(zip(*pairs, strict=True), start=1):
        for name in ("responses", "rollout_log_probs", "rewards"):
            for first, second in zip(one["columns"][name], other["columns"][name], strict=True):
                assert np.array_equal(first, second, equal_nan=True), f"{text}: {name} of iteration {number}"
        counted = {line["iteration"]: line for line in theirs[0]["metrics"]}
        for line in ours[0]["metrics"]:
            for name in ("rollout/tokens_per_step", "rollout/draft_acceptance"):
                assert line.get(name) == counted[line["iteration"]].get(name), f"{text}: {name} of {line['iteration']}"
        for name, value in one["after"]["actor"].items():
            assert np.array_equal(value, other["after"]["actor"][name]), f"{text}: {name} after iteration {number}"


def _first(reports: list[dict[str, Any]]) -> list[Any]:
    """Responses of the first iteration."""
    return next(record["columns"]["responses"] for record in reports[0]["records"] if "columns" in record)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if len(_SOME[name][1]) > 2 else ()) for name in _SOME]
)
def test_a_run_of_several_ingredients_equals_its_reference(
    ranks: Callable[[int], Ranks], folders: Folders, tmp_path: Path, name: str
) -> None:
    seed, names = _SOME[name]
    assert not compare(frozenset(names), seed + _SEED - 1, ranks, folders, tmp_path)


@pytest.mark.parametrize(
    "compared",
    [
        pytest.param(run, id="-".join(sorted(run.names)), marks=pytest.mark.extra if number % _ONE_OF else pytest.mark.slow)
        for number, run in enumerate(read_comparisons())
    ],
)
def test_a_run_that_has_equalled_its_reference_does(
    ranks: Callable[[int], Ranks], folders: Folders, tmp_path: Path, compared: Compared
) -> None:
    try:
        compare(compared.names, compared.seed, ranks, folders, tmp_path)
    except InconclusiveError as error:  # in bfloat16 rounding may hide what the bounds of that day could tell
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_run_in_bfloat16_without_a_half_of_the_gradient_of_an_expert_fails(
    ranks: Callable[[int], Ranks], folders: Folders, tmp_path: Path
) -> None:
    for draw in range(_DRAWS):
        run = build(frozenset(("bf16", "experts", "fsdp")), 4 + 100_000 * draw, folders, tmp_path / str(draw))
        reports = ranks(1).run(jobs.run, path=run.path, folder=str(tmp_path / f"run {draw}"), timeout_s=240)
        try:
            Comparison(run, folders[run.model]).check(reports)
        except InconclusiveError:
            continue
        break
    gradients = next(record["update_actor"][0] for record in reports[0]["records"] if record.get("update_actor"))
    experts = sorted((name for name in gradients if ".experts." in name), key=lambda name: np.linalg.norm(gradients[name]))
    for name, factor in ((experts[-1], 0.5), (experts[len(experts) // 2], 0.5), (experts[len(experts) // 2], 0.0)):
        was, gradients[name] = gradients[name], factor * gradients[name]
        # of an expert of few tokens each draw shows nothing, and a comparison without a draw that does fails
        with pytest.raises((AssertionError, InconclusiveError), match=f"gradient {name}"):
            Comparison(run, folders[run.model]).check(reports)
        gradients[name] = was


@pytest.mark.slow
@pytest.mark.skipif(
    not {"PRODUCT_ALL", "PRODUCT_NEW", "PRODUCT_RUN", "PRODUCT_NAMES"} & set(os.environ),
    reason="a search for new faults: PRODUCT_ALL=1 makes a run for every pair, PRODUCT_NEW=1 for pairs that have none, "
    "PRODUCT_RUN=N,M some of these, PRODUCT_NAMES=A+B,C+D others; PRODUCT_RECORD=1 adds those that are equal to the runs of "
    "--all and --extra",
)
def test_every_pair_of_ingredients_is_in_a_run_that_equals_its_reference(
    ranks: Callable[[int], Ranks], folders: Folders, tmp_path: Path
) -> None:
    rules = Rules(folders, tmp_path / "rules")
    if names := os.environ.get("PRODUCT_NAMES"):
        # one that the rules refuse is an empty set, and not made
        runs = [rules.refusal_of_all(chosen.split("+"))[1] for chosen in names.split(",")]
    else:
        allowed, _ = list_pairs(rules)
        runs = cover(rules, allowed, seed=_SEED, compared=read_comparisons() if "PRODUCT_NEW" in os.environ else ())
    chosen = list(map(int, filter(None, os.environ.get("PRODUCT_RUN", "").split(",")))) or range(len(runs))
    failed = []
    for number in chosen:
        try:
            assert runs[number], "the rules refuse this run"
            notes = compare(runs[number], _SEED + number, ranks, folders, tmp_path / str(number))
            print(f"run {number}: {', '.join(sorted(runs[number]))}: {'; '.join(notes) or 'equal'}")
            if "PRODUCT_RECORD" in os.environ:
                record_comparison(runs[number], _SEED + number)
        except Exception as error:  # noqa: BLE001  (all runs are made)
            failed.append(f"PRODUCT_RUN={number} ({', '.join(sorted(runs[number]))}): {_find_reason(error)}")
            print(failed[-1])
    assert not failed, f"{len(failed)} of {len(chosen)} runs:\n" + "\n".join(failed)


def _find_reason(error: Exception) -> str:
    """The error, and the calls that led to it: those of each rank that failed, the first one first, but for equal ones."""
    if not isinstance(error, RankFailureError):
        # a comparison's text begins with what differs
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return f"{type(error).__name__}: {str(error)[:_MOST_OF_AN_ERROR]}\n{where}"
    if not error.tracebacks:
        return str(error)[-_MOST_OF_AN_ERROR:]
    ranks: dict[str, list[int]] = {}
    for rank, said in error.tracebacks.items():
        ranks.setdefault(said, []).append(rank)
    return "\n".join(f"rank {', '.join(map(str, those))}: {said[-_MOST_OF_AN_ERROR:]}" for said, those in ranks.items())


def test_every_ingredient_is_a_run_and_every_name_has_a_record(folders: Folders, tmp_path: Path) -> None:
    rules = Rules(folders, tmp_path)
    for name in BY_NAME:
        why, _ = rules.refusal_of_all([name])
        assert not why, f"{name}: {why}"


def test_the_last_day_of_a_pair_is_that_of_its_newest_run_of_the_same_precision() -> None:
    rows = json.loads((Path(__file__).parent / "product_compared.json").read_text())
    expected: dict[tuple[Any, ...], str] = {}
    for day, _, names in rows:
        is_rough = any(name in names for name in ("bf16", "bf16_sums", "gated_delta", "dropout"))
        for pair in itertools.combinations(sorted(names), 2):
            key = (*pair, is_rough)
            expected[key] = max(day, expected.get(key, ""))
    assert len({(one, other) for one, other, _ in expected}) > 2000
    runs = read_comparisons()
    for one, other in itertools.combinations(sorted(BY_NAME), 2):
        for is_rough in (False, True):
            day = find_last_day(frozenset((one, other)), is_rough, runs)
            assert day == expected.get((one, other, is_rough), "never")


@pytest.mark.parametrize("model", ["moe_mixed", "deepseek"])
def test_experts_of_an_input_nearby_need_no_larger_change_of_it_and_those_of_another_token_do(
    folders: Folders, model: str
) -> None:
    (gate,) = SlowModel(folders[model]["actor"], 1.0, Margins()).gates[:1]
    generator = torch.Generator().manual_seed(3)
    hidden, noise = torch.randn(2, 400, gate.weight.size(1), dtype=torch.float64, generator=generator)
    own = gate.forward(hidden)[2]
    assert not measure_force(gate, hidden, own).any()
    for size in (0.1, 0.01):
        change = size * noise / noise.norm(dim=1, keepdim=True) * hidden.norm(dim=1, keepdim=True)
        others = gate.forward(hidden + change)[2]
        assert 0 < int((others != own).any(1).sum()) < 200
        # sigmoids are steeper in between
        assert (
            float(measure_force(gate, hidden, others).max()) < (1.0 if model == "moe_mixed" else 1.0 + 5 * size) * size + 1e-9
        )
    others = measure_force(gate, hidden, own.roll(1, 0))
    assert float((others == 0.0).double().mean()) < 0.7 and float(others.max()) > 0.2


def test_the_traceback_of_a_failed_rank_reaches_the_reason(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    with pytest.raises(RankFailureError) as caught:
        ranks(1).run(jobs.run, path=str(tmp_path / "missing.yaml"), folder=str(tmp_path))
    reason = _find_reason(caught.value)
    assert reason.startswith("rank 0: Traceback") and "product_jobs.py" in reason and "missing.yaml" in reason

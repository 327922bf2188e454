"""The rollout engine in the training process: one request at a time, on one rank or on a tensor-parallel pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import in_process_jobs as jobs
import pytest
from ranks import Ranks
from training_jobs import Setting

SIZES = [pytest.param(1, id="TP1"), pytest.param(2, id="TP2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    group = Ranks(request.param, "rollout")
    yield group
    group.close()


def run(ranks: Ranks, job: Any, models: dict[str, Path]) -> dict[str, Any]:
    """What the first rank of the replica reports; its peer has no answers."""
    keys = {"tensor_model_parallel_size": ranks.size}
    reports = ranks.run(job, setting=Setting(str(models["tied"]), keys), infer_tp=ranks.size, timeout_s=300)
    return reports[0]


def test_responses_are_bit_for_bit_those_of_the_engine_s_own_loop(ranks: Ranks, models: dict[str, Path]) -> None:
    report = run(ranks, jobs.compare, models)
    assert len(report["ours"]) == len(report["theirs"]) == 16
    for ours, theirs in zip(report["ours"], report["theirs"]):
        assert list(ours.token_ids) == theirs.token_ids
        assert list(ours.log_probs) == theirs.log_probs
        assert ours.finish == ("length" if theirs.truncated else "stop")
        assert set(ours.versions) <= {0}


def test_a_response_that_was_cut_goes_on_behind_its_tokens(ranks: Ranks, models: dict[str, Path]) -> None:
    report = run(ranks, jobs.interrupt, models)
    rest = iter(report["rest"])
    assert any(response.finish == "aborted" for response in report["cut"])
    assert report["ended"] == report["again"]
    for whole, cut, ended in zip(report["whole"], report["cut"], report["ended"]):
        kept = len(cut.token_ids)
        assert cut.token_ids == whole.token_ids[:kept] == ended.token_ids[:kept]
        assert cut.log_probs == whole.log_probs[:kept] == ended.log_probs[:kept]
        if cut.finish != "aborted":
            assert cut == ended == whole
            continue
        assert 0 < kept < 24
        expected = next(rest)
        assert list(ended.token_ids[kept:]) == expected.token_ids
        assert list(ended.log_probs[kept:]) == pytest.approx(expected.log_probs, abs=1e-5)  # another batch around it
        assert ended.versions == (0,) * kept + (1,) * (len(ended.token_ids) - kept)


def test_a_frozen_response_records_the_weights_of_each_token(ranks: Ranks, models: dict[str, Path]) -> None:
    report = run(ranks, jobs.freeze, models)
    mixed = [response for response in report["ended"] if set(response.versions) == {0, 1}]
    assert mixed
    assert all(list(response.versions) == sorted(response.versions) for response in report["ended"])
    # the weights are the same numbers, so freezing changes nothing else
    for whole, ended in zip(report["whole"], report["ended"]):
        assert (ended.token_ids, ended.log_probs, ended.finish) == (whole.token_ids, whole.log_probs, whole.finish)

"""Every training layout feeds every rollout layout: proven delivery, equal log-probs, the update of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rollout_jobs as jobs
from comparison import losses
from ranks import Ranks
from slow_layouts import EP, PP, VPP
from training_jobs import Setting

from mindspeed_rl.observability.metrics import merge

TP, SP = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ZERO = {"use_distributed_optimizer": True}
ULYSSES = {"context_parallel_size": 2}

#: name -> processes, inference TP, model, training keys; neighbours with the same first three share their engines
LAYOUTS: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "TP2 PP2 to TP2x2": (4, 2, "tied", TP | PP),
    "TP2 PP2 to TP1x4": (4, 1, "tied", SP | PP),
    "TP2 PP2 to TP4": (4, 4, "tied", SP | PP),
    "TP2 experts to TP2": (2, 2, "moe", SP),
    "EP2 to TP2": (2, 2, "moe", EP),
    "EP2 grouped to TP1x2": (2, 1, "moe", EP | {"moe_grouped_gemm": True}),
    "TP2 to TP1x2": (2, 1, "tied", SP),
    "DP2 to TP1x2": (2, 1, "tied", ZERO),
    "PP2 to TP1x2": (2, 1, "tied", PP),
    "VPP2 to TP1x2": (2, 1, "tied", VPP),
    "CP2 to TP1x2": (2, 1, "tied", ULYSSES),
    "TP2 to TP2": (2, 2, "tied", TP | ZERO),
    "PP2 to TP2": (2, 2, "tied", PP | {"num_layer_list": "1,3"}),
    "DP2 overlapped to TP2": (2, 2, "tied", ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
SLOW = (4, 1, "tied"), (4, 2, "tied"), (4, 4, "tied"), (2, 2, "moe")
MARKED = [
    pytest.param(*layout, id=name, marks=[pytest.mark.slow] if layout[:3] in SLOW else []) for name, layout in LAYOUTS.items()
]
BOTH = [pytest.param(2, PP, id="TP2"), pytest.param(1, SP, id="TP1x2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def pools() -> Any:
    """(processes, inference TP, model) -> ranks that keep their engine; only one such group lives at a time."""
    open_pool: dict[tuple[int, int, str], Ranks] = {}

    def pool(size: int, infer_tp: int, model: str = "tied") -> Ranks:
        if (size, infer_tp, model) not in open_pool:
            close()
            open_pool[size, infer_tp, model] = Ranks(size, "rollout")
        return open_pool[size, infer_tp, model]

    def close() -> None:
        for group in open_pool.values():
            group.close()
        open_pool.clear()

    yield pool
    close()


@pytest.fixture(scope="module")
def single_process(models: dict[str, Path]) -> Callable[[str], dict[str, Any]]:
    """(model name) -> what one process with one engine reports."""
    known: dict[str, dict[str, Any]] = {}

    def get(name: str) -> dict[str, Any]:
        if name not in known:
            group = Ranks(1, "rollout")
            known[name] = group.run(jobs.learn, setting=Setting(str(models[name])), infer_tp=1, timeout_s=300)[0]
            group.close()
        return known[name]

    return get


@pytest.mark.parametrize(("size", "infer_tp", "name", "keys"), MARKED)
def test_weights_arrive_and_the_update_equals_a_single_process(
    pools: Callable[..., Ranks],
    single_process: Callable[[str], dict[str, Any]],
    models: dict[str, Path],
    size: int,
    infer_tp: int,
    name: str,
    keys: dict[str, Any],
) -> None:
    setting = Setting(str(models[name]), keys)
    reports = pools(size, infer_tp, name).run(jobs.learn, setting=setting, infer_tp=infer_tp, timeout_s=300)
    reference = single_process(name)
    for report in reports:
        assert report["proven"] == reference["proven"]
        assert max(report["differences"]) < 1e-4
        assert report["tokens"][0] == reference["tokens"][0]
        assert report["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    # a loss of centred advantages is a mean of parts near one that cancel: float32 leaves 1e-7 of each
    assert losses(reports) == pytest.approx(losses([reference]), rel=1e-5, abs=1e-6)
    first_steps = [merge(report["metrics"][0] for report in group)["loss"].count for group in (reports, [reference])]
    assert first_steps[0] == first_steps[1] == sum(map(len, reference["tokens"][0]))


def test_packed_linear_layers_are_packed_anew_after_each_push(pools: Callable[..., Ranks], models: dict[str, Path]) -> None:
    setting = Setting(str(models["tied"]), PP)
    for report in pools(2, 2).run(jobs.learn_packed, setting=setting, infer_tp=2, timeout_s=300):
        assert max(report["differences"]) < 1e-4
        assert report["after push"] == [0, 0, 0] and report["after release"] == 0
        # a rank's part of the four layers and of the head, which is padded to 192 rows: query, key and value 128 rows of 128,
        # output 128 of 64, gate and up 96 of 128, down 128 of 48
        held = 4 * (128 * 128 + 128 * 64 + 96 * 128 + 128 * 48) + 96 * 128
        assert report["after generating"] == [4 * held] * 3


@pytest.mark.parametrize(("infer_tp", "keys"), BOTH)
def test_damaged_and_stale_weights_are_named(
    pools: Callable[..., Ranks], models: dict[str, Path], infer_tp: int, keys: dict[str, Any]
) -> None:
    setting = Setting(str(models["tied"]), keys)
    for said in pools(2, infer_tp).run(jobs.misdeliver, setting=setting, infer_tp=infer_tp, timeout_s=300):
        assert (
            "1 parameters of the rollout engine differ from those trained: model.layers.1.self_attn.o_proj.weight"
            in said["damaged"]
        )
        assert said["mended"] == said["pushed again"] == "nothing"
        assert "parameters of the rollout engine differ from those trained: model.embed_tokens.weight" in said["stale"]


@pytest.mark.parametrize(("infer_tp", "keys"), BOTH)
def test_an_engine_that_was_away_gives_the_same_responses(
    pools: Callable[..., Ranks], models: dict[str, Path], infer_tp: int, keys: dict[str, Any]
) -> None:
    reports = pools(2, infer_tp).run(jobs.rest, setting=Setting(str(models["tied"]), keys), infer_tp=infer_tp, timeout_s=300)
    for report in reports:
        assert report["tokens"] == reports[0]["tokens"]
        assert report["repeats"] and report["rested"] == [True] * 10 and report["draws nothing"]


def test_no_shared_memory_is_left_behind(pools: Callable[..., Ranks], models: dict[str, Path]) -> None:
    before = set(Path("/dev/shm").glob("*test-*"))
    pools(2, 2).run(jobs.rest, setting=Setting(str(models["tied"])), infer_tp=2, timeout_s=300)
    assert set(Path("/dev/shm").glob("*test-*")) == before == set()

"""Of several failures the one is named that brought the others about."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import ray
from ray import cloudpickle

from mindspeed_rl.runtime.futures import WorkerError, wait_all

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it from here


class Worker:
    """Fails in the way and at the time that it is told."""

    def work(self, how: str, after_s: float = 0.0) -> str:
        time.sleep(after_s)
        if how == "die":
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        if how == "lost peer":
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:56982.")
        if how == "own error":
            raise ValueError("the prompt is too long")
        return how


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("fates", "failed"),
    [
        ((("lost peer", 0.0), ("die", 0.5)), r"worker 1 failed in update: its process died"),
        ((("lost peer", 0.0), ("own error", 0.5)), r"worker 1 failed in update: ValueError: the prompt is too long"),
        ((("own error", 0.0), ("well", 30.0)), r"worker 0 failed in update: ValueError: the prompt is too long"),
    ],
    ids=["death", "error", "alone"],
)
def test_the_cause_is_named_although_its_consequence_comes_first(
    local_ray: None, fates: tuple[tuple[str, float], ...], failed: str
) -> None:
    actors = [ray.remote(Worker).options(num_cpus=0).remote() for _ in fates]
    futures = [actor.work.remote(how, after_s) for actor, (how, after_s) in zip(actors, fates)]
    with pytest.raises(WorkerError, match=failed):
        wait_all(futures, ["worker 0", "worker 1"], "update", None)
    for actor in actors:
        ray.kill(actor)


class Unbuildable:
    """Raises while it is built."""

    def __init__(self) -> None:
        raise ValueError("two things:\n  - the first\n  - the second")

    def work(self) -> None: ...


def test_an_error_in_a_constructor_is_no_death(local_ray: None) -> None:
    actors = [ray.remote(Unbuildable).options(num_cpus=0).remote(), ray.remote(Worker).options(num_cpus=0).remote()]
    futures = [actors[0].work.remote(), actors[1].work.remote("lost peer")]
    with pytest.raises(WorkerError) as caught:
        wait_all(futures, ["worker 0", "worker 1"], "set_up", None)
    assert str(caught.value) == "worker 0 failed in set_up: ValueError: two things:\n  - the first\n  - the second"


def test_results_come_in_the_order_of_the_workers(local_ray: None) -> None:
    actors = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    futures = [actors[0].work.remote("slow", 0.3), actors[1].work.remote("fast")]
    assert wait_all(futures, ["worker 0", "worker 1"], "update", None) == ["slow", "fast"]

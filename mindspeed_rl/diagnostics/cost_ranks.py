"""Ranks of this machine that count what their iteration costs: processes without Ray, prepared before they import Megatron."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mindspeed_rl import platform, registry
from mindspeed_rl.config import MegatronConfig, Objective, RLConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.runtime.process import free_port, prepare_process


@dataclass(frozen=True)
class CountOrder:
    """What is counted.

    Attributes:
        config, plan: of the actor, with the layers that are counted.
        columns: what the policy loss reads besides advantages, masks and the rollout's log-probs.
        temperature: logits are divided by it.
        platform: name of the device kind.
        world_size: ranks.
        rows, tokens: of an update on one rank, and of each row.
        plain: Megatron alone trains, in place of the suite's engine.
    """

    config: MegatronConfig
    plan: ModelPlan
    rl: RLConfig
    objective: Objective
    columns: tuple[str, ...]
    temperature: float
    platform: str
    world_size: int
    rows: int
    tokens: int
    plain: bool = False


def micro_batch_rows(order: CountOrder) -> list[int]:
    """Rows of each micro-batch of an update, where all rows fit a token budget."""
    size = order.rows if order.rl.use_dynamic_bsz else order.config.micro_batch_size or 1
    return [min(size, order.rows - first) for first in range(0, order.rows, size)]


def count_on_ranks(order: CountOrder, *, timeout_s: float) -> list[dict[str, Any]]:
    """What `counted_step.count` returned on every rank.

    Raises:
        RuntimeError: a rank failed, with its words, or nothing came in time.
    """
    context = multiprocessing.get_context("spawn")
    master = str(free_port("127.0.0.1"))
    ends: list[Connection] = []
    processes = []
    for rank in range(order.world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(order, rank, master, sender), daemon=True)
        process.start()
        # or the pipe would stay open here when the rank dies, and nobody would hear of it
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        return _answers(ends, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(ends: list[Connection], deadline: float) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {[rank for rank in range(len(ends)) if rank not in found]} did not answer in time.")
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.index(end)
            try:
                answer = end.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a word; its own output says why.") from None
            if isinstance(answer, str):
                raise RuntimeError(f"rank {rank}: {answer}")
            found[rank] = answer
    return [found[rank] for rank in range(len(ends))]


def _rank(order: CountOrder, rank: int, port: str, sender: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(order.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    os.dup2(2, 1)  # libraries talk while they load, and standard output is the command's
    try:
        platform.select(order.platform)
        prepare_process(("train",), order.config)
        answer = registry.load("mindspeed_rl.diagnostics.cost_worker:count", "what is counted")(order)
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")
        raise
    sender.send(answer)
    os._exit(0)  # libraries take long to leave

"""Samples and bytes a second through the data plane, td and tq, with one to eight clients at a time.

    python benchmarks/dataplane.py --strategies td tq --clients 1 2 4 8 --tokens 8192
    python benchmarks/dataplane.py --strategies tq --clients 1 --profile

Each client is a process: all of them put their share of the rows, then all get as many. A row is what a long response brings:
token ids, log-probs of trainer, rollout and reference, advantages, and a mask. Ray runs only on this machine, so what is
measured is copies, serialization and messages, not a network. `--profile` prints where a client's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from headline import Headline

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROUNDS = 3
COLUMNS = ("responses", "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "loss_mask")
#: of a token in all columns
BYTES_A_TOKEN = 8 + 4 * 4 + 1


class Client:
    """A process with its rows."""

    def __init__(self, plane: Any, rows: list[int], tokens: int) -> None:
        import torch

        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(rows[0])
        self._plane, self._rows = plane, rows
        floats = {name: [torch.randn(tokens, generator=generator) for _ in rows] for name in COLUMNS[1:-1]}
        self._data: dict[str, Any] = {
            "responses": [torch.randint(0, 150_000, (tokens,), generator=generator) for _ in rows],
            **floats,
            "loss_mask": [torch.ones(tokens, dtype=torch.bool) for _ in rows],
        }

    def put(self) -> float:
        """Seconds that it took to put all rows."""
        return _timed(lambda: self._plane.put(self._data, self._rows))

    def get(self) -> float:
        """Seconds that it took to get all rows, as they were put."""
        found: list[Any] = []
        seconds = _timed(lambda: found.append(self._plane.get("trainer", list(COLUMNS), indexes=self._rows, timeout_s=60.0)))
        batch, rows = found[0]
        assert rows == self._rows and bool((batch["responses"][0] == self._data["responses"][0]).all())
        return seconds

    def profile(self, method: str) -> str:
        """Where the time of a call goes."""
        profiler, text = cProfile.Profile(), io.StringIO()
        profiler.runcall(getattr(self, method))
        pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(24)
        return text.getvalue()


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(strategy: str, clients: int, rows: int, tokens: int, profile: bool) -> float:
    """Prints a row of the table; returns samples a second that are put and got again."""
    from mindspeed_rl.dataplane.client import make_data_plane

    plane = make_data_plane(strategy, rows, 1, {"rollout": COLUMNS, "trainer": ()})
    try:
        remote = ray.remote(Client).options(num_cpus=0)
        share = rows // clients
        processes: list[Any] = [
            remote.remote(plane, list(range(number * share, (number + 1) * share)), tokens) for number in range(clients)
        ]
        seconds: dict[str, list[float]] = {"put": [], "get": []}
        for turn in range(ROUNDS + 1):
            for kind, found in seconds.items():
                start = time.perf_counter()
                ray.get([getattr(process, kind).remote() for process in processes], timeout=300)
                if turn:  # connections are made in the first one
                    found.append(time.perf_counter() - start)
            plane.clear(rows)
        cells = [strategy, str(clients), str(rows), str(tokens)]
        for found in seconds.values():
            middle = statistics.median(found)
            cells += [f"{rows / middle:.0f}", f"{rows * tokens * BYTES_A_TOKEN / middle / 1e6:.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        if profile:
            for kind in seconds:
                print(f"--- {strategy}: {kind}\n{ray.get(processes[0].profile.remote(kind))}")
        for process in processes:
            ray.kill(process)
        return rows / sum(statistics.median(found) for found in seconds.values())
    finally:
        plane.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["td", "tq"], choices=["td", "tq"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    columns = ("engine", "clients", "rows", "tokens", "put: samples/s", "MB/s", "get: samples/s", "MB/s")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    try:
        for tokens in arguments.tokens:
            found: dict[int, list[float]] = {clients: [] for clients in arguments.clients}
            for strategy in arguments.strategies:
                for clients in arguments.clients:
                    found[clients].append(measure(strategy, clients, arguments.rows, tokens, arguments.profile))
            for clients, rates in found.items():
                first, *others = zip(arguments.strategies, rates)
                for name, rate in others:
                    what = f"samples/s of {tokens} tokens through the data plane and back, {first[0]}, clients: {clients}"
                    Headline(what, f"{first[1]:.0f}", name, f"{rate:.0f}", first[1] / rate).say()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()

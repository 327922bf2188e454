"""A server on two devices, one of which dies, is stopped or does not answer: it ends, and started again it loses nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patient
from service_ranks_program import make_model, tree
from service_requests import read_pass
from service_server import ServerProcess, running

pytestmark = [pytest.mark.slow, pytest.mark.extra]
NUM_STEPS = 12


class Server(ServerProcess):
    """A server process on data-parallel ranks."""

    lora_config = {"rank": 2, "seed": 1}

    def __init__(self, folder: Path, num_ranks: int = 2, **keys: Any) -> None:
        make_model(folder / "model")
        run = tree(str(folder / "model"), folder, 1, num_ranks)
        run["rl_config"] |= {"fault_tolerance": {"heartbeat_interval_s": 1.0}, **keys}
        super().__init__(folder, run, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, limit_s=240)

    def find_ranks(self) -> list[psutil.Process]:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "WorkerProcess" in " ".join(child.cmdline())]

    def wait_for_end(self, ranks: list[psutil.Process], limit_s: float) -> float:
        """Return the seconds until the server has ended by itself, with none of its ranks left."""
        assert self.process is not None
        start_s = time.monotonic()
        assert len(ranks) == 2 and self.process.wait(patient(limit_s)) == 1, self.read_log()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        return time.monotonic() - start_s


class Hang:
    """A load of a checkpoint that does not end: nobody writes the file that it reads."""

    def __init__(self, server: Server, model: str, name: str) -> None:
        """Save the model after two requests of it, and load it from a checkpoint whose file `name` is a pipe."""
        self._server, self._model = server, model
        body = {"model_id": model, "seq_id": 3, "path": "kept"}
        self._path = server.fetch(server.post("save_weights", body))["path"]
        self._expected = self._pass(4)
        checkpoints = (server.folder / "server" / "checkpoints").rglob(name)
        self._file = max(checkpoints, key=lambda each: each.stat().st_mtime)
        self._content = self._file.read_bytes()
        self._file.unlink()
        os.mkfifo(self._file)
        body = {"model_id": model, "seq_id": 5, "path": self._path, "optimizer": True}
        # a server whose thread keeps Python's lock may not answer any more; the request is then sent again
        self._future = ThreadPoolExecutor(1).submit(server.post, "load_weights", body)

    def _pass(self, seq: int) -> tuple[Any, bytes]:
        future = self._server.run_pass(self._model, seq, [5, 6, 7], [6, 7, 8], forward_only=True)[1]
        metrics, log_probs = read_pass(self._server.fetch(future))
        return metrics, log_probs.tobytes()

    def end_after_a_restart(self) -> None:
        """Start the server with the file as it was: the load ends, and the model has the numbers of before."""
        self._file.unlink()
        self._file.write_bytes(self._content)
        self._server.start()
        future = self._future.result(timeout=patient(240))
        assert self._server.fetch(future)["path"] == self._path
        assert self._pass(6) == self._expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(tmp_path_factory.mktemp("service_lost_ranks"))) as server:
        yield server


def train(server: Server, seen: list[Any]) -> list[Any]:
    """Append losses, log-probs, counts of steps and samples of a loop with two passes a step to `seen`, and return it."""
    model = server.open_model()
    session = model.partition(":")[0]
    seq = 1
    for step in range(NUM_STEPS):
        futures = []
        for part in range(2):
            tokens = [5 + (7 * step + 3 * part + index) % 80 for index in range(9 + part)]
            status, future = server.run_pass(model, seq, tokens[:-1], tokens[1:])
            assert status == 200, future
            futures.append(future)
            seq += 1
        stepped = server.step(model, seq)
        seq += 1
        for future in futures:
            metrics, log_probs = read_pass(server.fetch(future))
            seen.append([metrics["loss:sum"], log_probs.tobytes()])
        metrics = server.fetch(stepped)["metrics"]
        assert metrics["step:max"] == step + 1  # none was lost, and none applied twice
        seen.append(metrics)
        if step % 4 == 3:
            body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": step}
            sampler = server.fetch(server.post("save_weights_for_sampler", body))["sampling_session_id"]
            seq += 1
            assert sampler.startswith(session)
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
            params = {"max_tokens": 6, "seed": step}
            asked = {"prompt": prompt, "sampling_params": params, "num_samples": 2, "sampling_session_id": sampler, "seq_id": 0}
            seen.append(server.fetch(server.post("asample", asked)))
    return seen


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    return train(server, [])


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "its process died"), (signal.SIGSTOP, "is stopped")])
def test_a_rank_that_dies_or_is_stopped_changes_no_bit_of_a_loop(
    server: Server, undisturbed: list[Any], number: signal.Signals, said: str
) -> None:
    seen: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, server, seen)
        while len(seen) < 10:
            assert not training.done() or training.result()
            time.sleep(0.02)
        ranks = server.find_ranks()
        ranks[-1].send_signal(number)
        ended_s = server.wait_for_end(ranks, 60)
        server.start()
        result = training.result(timeout=patient(240))
    print(f"{number.name}: the server ended after {ended_s:.1f} s")
    assert said in server.read_log()
    assert result == undisturbed


def test_ranks_without_a_heartbeat_end_the_server_and_their_operation_is_done_after_the_restart(server: Server) -> None:
    """A file that nobody writes is what ranks wait for, in a library that keeps Python's lock."""
    model = server.open_model()
    server.fetch(server.run_pass(model, 1, [5, 6, 7], [6, 7, 8])[1])
    server.fetch(server.step(model, 2))
    ranks = server.find_ranks()
    hang = Hang(server, model, "state.safetensors")
    ended_s = server.wait_for_end(ranks, 150)
    hang.end_after_a_restart()
    print(f"without a heartbeat: the server ended after {ended_s:.1f} s")
    assert "has no heartbeat any more" in server.read_log()


def test_a_killed_server_leaves_no_rank_and_continues(server: Server, undisturbed: list[Any]) -> None:
    seen: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        training: Any = pool.submit(train, server, seen)
        while len(seen) < 10:
            assert not training.done() or training.result()
            time.sleep(0.02)
        ranks = server.find_ranks()
        assert server.process is not None and len(ranks) == 2
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(patient(30))
        _, left = psutil.wait_procs(ranks, timeout=patient(60))
        assert not left
        server.start()
        assert training.result(timeout=patient(240)) == undisturbed

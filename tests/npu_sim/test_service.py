"""`mindspeed-rl serve` on a simulated NPU: a server process has the numbers of the same loop in process, also after a kill."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import patient
from ranks import run_ranks
from service_requests import read_pass
from service_server import ServerProcess, running

from mindspeed_rl.service import messages, protobuf

sys.path.append(str(Path(__file__).parents[1] / "dist"))

pytestmark = pytest.mark.slow

RANK, SEED, LEARNING_RATE = 4, 3, 1e-2
DATA = [[5 + (7 * step + index) % 80 for index in range(10 + step)] for step in range(4)]
PROMPT = [5, 6, 7, 8]
SAMPLED = {"max_tokens": 6, "seed": 11, "num_samples": 2, "ends_at_eos": False}


class Server(ServerProcess):
    """A server process on one simulated device."""

    lora_config = {"rank": RANK, "seed": SEED}

    def __init__(self, folder: Path) -> None:
        from service_program import run_tree
        from test_lora_rl import save_model

        # vLLM's dummy adapter of a tied head has the largest rank's columns and a row per hidden element
        save_model(folder / "model", 128)
        serve = {"num_models": 3, "num_engine_adapters": 2, "folder": str(folder / "serve")}
        keys = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
        # vllm-ascend's kernels of adapters up to rank 64 take bfloat16, which has no digits to compare
        run = run_tree(str(folder / "model"), "npu", lora_r=128, serve=serve, **keys)
        super().__init__(folder, run, {}, limit_s=300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_MEMORY_GIB", "4")  # of which the engine takes a share; the whole of a device is 64 GiB
        patch.setenv("NPU_SIM_RUN_DIR", str(tmp_path_factory.mktemp("hccl")))
        with running(Server(tmp_path_factory.mktemp("service"))) as server:
            yield server


def compute(server: Server, model: str, seq: int, tokens: list[int], *, forward_only: bool = False) -> dict[str, Any]:
    """Send a pass; return its future."""
    status, future = server.run_pass(model, seq, tokens[:-1], tokens[1:], forward_only=forward_only)
    assert status == 200, future
    return future


def read_numbers(server: Server, future: dict[str, Any]) -> list[Any]:
    metrics, log_probs = read_pass(server.fetch(future))
    return [metrics["loss:sum"], log_probs.tolist()]


def follow(server: Server, seen: list[Any]) -> list[Any]:
    """Append what a client sees of the loop to `seen`, and return it: passes, steps, samples, and a pass of a loaded model."""
    model, seq = server.open_model(), 1
    session = model.partition(":")[0]
    for tokens in DATA:
        future = compute(server, model, seq, tokens)
        body = {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": LEARNING_RATE}}
        stepped = server.post("optim_step", body)
        seen += [read_numbers(server, future), server.fetch(stepped)["metrics"]]
        seq += 2
    saved = server.fetch(server.post("save_weights", {"model_id": model, "seq_id": seq, "path": "kept"}))["path"]
    body = {"model_id": model, "seq_id": seq + 1, "sampling_session_seq_id": 0}
    sampler = server.fetch(server.post("save_weights_for_sampler", body))["sampling_session_id"]
    asked = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        # an empty list: the model's end tokens do not end a sample
        "sampling_params": {"max_tokens": SAMPLED["max_tokens"], "seed": SAMPLED["seed"], "stop": []},
        "num_samples": SAMPLED["num_samples"],
        "sampling_session_id": sampler,
        "seq_id": 0,
    }
    seen.append(read_samples(server.fetch(server.post("asample", asked))))
    body = {"session_id": session, "model_seq_id": 1, "path": saved, "optimizer": True}
    loaded = server.fetch(server.post("load_weights", body))["model_id"]
    seen.append(read_numbers(server, compute(server, loaded, 1, DATA[0], forward_only=True)))
    server.post("unload_model", {"model_id": loaded})
    return seen


def read_samples(content: bytes) -> list[Any]:
    message = protobuf.decode(messages._SAMPLE_RESULT, memoryview(content))
    return [
        [np.frombuffer(each["tokens"], np.int32).tolist(), np.frombuffer(each["logprobs"], np.float32).tolist()]
        for each in message["sequences"]
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    return follow(server, [])


def test_a_server_has_the_numbers_of_the_same_loop_in_process(server: Server, undisturbed: list[Any]) -> None:
    settings = {"data": DATA, "prompt": PROMPT, "sampled": SAMPLED, "rank": RANK, "seed": SEED, "learning_rate": LEARNING_RATE}
    (seen,) = run_ranks("service_trainer", 1, {"folder": str(server.folder), **settings}, timeout_s=600)
    assert json.loads(json.dumps(undisturbed)) == seen
    losses = [seen[2 * step][0] / (len(tokens) - 1) for step, tokens in enumerate(DATA)]
    assert losses[0] > losses[-1] and seen[-1][0] < seen[0][0]  # it has learned something


def test_a_killed_server_changes_no_number_of_a_loop(server: Server, undisturbed: list[Any]) -> None:
    seen: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, server, seen)
        while len(seen) < 4:
            assert not following.done() or following.result()
            time.sleep(0.02)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        server.start()
        assert following.result(timeout=patient(300)) == undisturbed

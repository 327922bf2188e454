"""Steps and samples of a training service: over HTTP and in the same process, and of 1, 2 and 4 models at once.

usage: python benchmarks/service.py [--size tiny|135m] [--rounds N] [--tokens N] [--samples N] [--only steps|samples] [--exact]
    [--profile]

One process makes all of it, in turns: a step (`forward_backward` of 8 sequences and `optim_step`) by calls of the object that
trains, the same by the backend that a server calls, and the same by a client of the API over HTTP; steps of several models in
joint passes (with --exact) and each in passes of its own; and samples of several models at the same time, beside as many of one
model and of the base, to show what adapters cost. Seconds are processor time of client and server together, as other programs
may use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
import uvicorn

from mindspeed_rl.config import RunConfig, build_run_config
from mindspeed_rl.service import messages, protobuf
from mindspeed_rl.service.api_server import listen
from mindspeed_rl.service.app import TinkerApp
from mindspeed_rl.service.backend import AdamParams, AdapterSpec, Datum, LossCall, PassCall, SampleCall
from mindspeed_rl.service.doors import Keys
from mindspeed_rl.service.ledger import Limits
from mindspeed_rl.service.local_backend import LocalBackend
from mindspeed_rl.service.service import Service

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
}
SEQUENCES = 8
NAMES = tuple("abcd")


def make_model(folder: Path, size: str) -> None:
    """A random model with a tokenizer of one token a character."""
    from tokenizers import Tokenizer, models

    words = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=32768, num_key_value_heads=SIZES[size]["num_attention_heads"], max_position_embeddings=2048, **SIZES[size]
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def run_config(folder: Path, tokens: int, exact: bool) -> RunConfig:
    path = str(folder)
    return build_run_config(
        {
            "platform": "cpu",
            "megatron_training": {"bf16": False, "tokenizer_name_or_path": path, "reset_attention_mask": True},
            "actor_config": {
                "finetune": True,
                "load": path,
                "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                "lora_r": 32,
                "lora_alpha": 32,
            },
            "rl_config": {"actor_resource": {"num_npus": 1}, "exact_log_probs": exact},
            "generate_config": {
                "infer_tensor_parallel_size": 1,
                "max_num_seqs": 64,
                "max_model_len": 2 * tokens,
                "dtype": "float32",
                "kv_cache_memory_gib": 1.0,
            },
            "serve_config": {"num_models": 5, "max_tokens_per_pass": 4 * SEQUENCES * tokens},
        }
    )


def make_data(tokens: int, seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 90, tokens + 1) for _ in range(SEQUENCES)]
    return [Datum(row[:-1].tolist(), {"target_tokens": row[1:], "weights": np.ones(tokens, np.float32)}) for row in rows]


class Client:
    """A client of the API over HTTP, of a server of this process."""

    def __init__(self, backend: LocalBackend, folder: Path) -> None:
        listening = listen("127.0.0.1", 0)
        threading.Thread(target=lambda: asyncio.run(self._serve(backend, folder, listening)), daemon=True).start()
        self._connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1])
        while not self._has_started():
            time.sleep(0.05)
        session = self._post("create_session", {})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": backend.capabilities().base_model}
        made = self._fetch(self._post("create_model", {**body, "lora_config": {"rank": 32, "seed": 0}}))
        self._model, self._seq = json.loads(made)["model_id"], 1

    @staticmethod
    async def _serve(backend: LocalBackend, folder: Path, listening: Any) -> None:
        service = Service(backend, folder, Limits(), lambda error: os._exit(1))
        service.start()
        app: Any = TinkerApp(service, Keys(None, b"s" * 32, only_local=True), compresses=False)
        config = uvicorn.Config(app, http="h11", log_level="warning", lifespan="off", timeout_keep_alive=3600)
        await uvicorn.Server(config).serve([listening])

    def _has_started(self) -> bool:
        try:
            self._connection.connect()
        except ConnectionRefusedError:
            return False
        return True

    def _send(self, path: str, body: bytes, kind: str) -> bytes:
        headers = {"x-api-key": "tml-benchmark-1", "content-type": kind}
        self._connection.request("POST", f"/api/v1/{path}", body, headers)
        reply = self._connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {content.decode()}")
        return content

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self._send(path, json.dumps(body).encode(), "application/json"))

    def _fetch(self, future: dict[str, Any]) -> bytes:
        while True:
            content = self._send(
                "retrieve_future", json.dumps({"request_id": future["request_id"]}).encode(), "application/json"
            )
            if b'"try_again"' not in content[:100]:
                return content

    def step(self, data: Sequence[Datum]) -> None:
        """Send a pass and a step, as the SDK does, and wait for both."""
        passes = json.loads(self._send("forward_backward", self._write(data), "application/x-protobuf"))
        params = {"learning_rate": 1e-4}
        steps = self._post("optim_step", {"model_id": self._model, "seq_id": self._seq + 1, "adam_params": params})
        self._seq += 2
        messages_of_pass = self._fetch(passes)
        if "step:max" not in json.loads(self._fetch(steps))["metrics"] or len(messages_of_pass) < 100:
            raise RuntimeError("a step failed")

    def _write(self, data: Sequence[Datum]) -> bytes:
        rows = []
        for datum in data:
            tokens = np.asarray(datum.tokens, "<i4").tobytes()
            inputs = [
                {"key": name, "value": {"dense": array.tobytes(), "dtype": kind, "shape": list(array.shape)}}
                for name, kind, array in (
                    ("target_tokens", 2, datum.inputs["target_tokens"]),
                    ("weights", 1, datum.inputs["weights"]),
                )
            ]
            rows.append({"model_input": [{"encoded_text": {"tokens": tokens}}], "loss_fn_inputs": inputs})
        message = {"model_id": self._model, "seq_id": self._seq, "data": rows, "loss_fn": "cross_entropy"}
        return protobuf.encode(messages._PASS_REQUEST, message)


async def _median(rounds: int, *functions: Callable[[int], Awaitable[object]]) -> list[float]:
    """Return the median seconds of each function; they take turns."""
    seconds: list[list[float]] = [[] for _ in functions]
    for index in range(rounds + 1):
        for function, own in zip(functions, seconds):
            started = time.process_time()
            await function(index)
            own.append(time.process_time() - started)
    return [statistics.median(own[1:]) for own in seconds]  # the first one warms up


async def measure_steps(backend: LocalBackend, folder: Path, rounds: int, tokens: int) -> None:
    """Print the seconds of steps of one model by each way, and the tokens per second of several models."""
    ce, adam = LossCall("cross_entropy"), AdamParams(1e-4)

    async def in_process(index: int) -> None:
        data = make_data(tokens, index)

        def step(tenants: Any) -> None:
            tenants.forward_backward("a", data, ce)
            tenants.optim_step("a", adam)

        await asyncio.wrap_future(backend.submit(step))

    async def step(name: str, index: int) -> None:
        await backend.forward_backward(name, make_data(tokens, index), ce, forward_only=False)
        await backend.optim_step(name, adam)

    client = await asyncio.to_thread(Client, backend, folder)
    alone, called, served = await _median(
        rounds,
        in_process,
        lambda index: step("a", index),
        lambda index: asyncio.to_thread(client.step, make_data(tokens, index)),
    )
    print(
        f"a step of {SEQUENCES} x {tokens} tokens: {alone:.3f} s in process, {called:.3f} s by the backend "
        f"({called / alone:.2f}), {served:.3f} s over HTTP ({served / alone:.2f})",
        flush=True,
    )
    joins = await asyncio.wrap_future(backend.submit(lambda tenants: tenants._joins_passes))

    async def train(count: int, joined: bool) -> float:
        await asyncio.wrap_future(backend.submit(lambda tenants: setattr(tenants, "_joins_passes", joined)))
        return (await _median(rounds, lambda index: asyncio.gather(*(step(name, index) for name in NAMES[:count]))))[0]

    for count in (1, 2, 4):
        trained = {"in joint passes": await train(count, True)} if joins and count > 1 else {}
        trained["each in passes of its own"] = await train(count, False)
        rates = ", ".join(f"{count * SEQUENCES * tokens / seconds:,.1f} {how}" for how, seconds in trained.items())
        print(f"{count} models: trained tokens/s {rates}", flush=True)


async def measure_samples(backend: LocalBackend, rounds: int, tokens: int, samples: int) -> None:
    """Print tokens per second of samples of one, two and four models, and of as many of one model and of the base."""
    for index, name in enumerate(NAMES):  # an adapter that was not trained is 0
        await backend.forward_backward(name, make_data(8, index), LossCall("cross_entropy"), forward_only=False)
        await backend.optim_step(name, AdamParams(1e-4))
    samplers = {name: await backend.make_sampler(name) for name in NAMES}
    samplers["base"] = await backend.make_sampler(None)

    def sample(names: Sequence[str]) -> Callable[[int], Awaitable[object]]:
        call = SampleCall(range(5, 13), max_tokens=tokens, num_samples=samples, seed=1, ends_at_eos=False)
        return lambda index: asyncio.gather(*(backend.sample(samplers[name], call) for name in names))

    runs = {f"{count} models": NAMES[:count] for count in (1, 2, 4)}
    runs |= {"4 calls of one model": ("a",) * 4, "1 call of the base": ("base",), "4 calls of the base": ("base",) * 4}
    seconds = await _median(rounds, *(sample(names) for names in runs.values()))
    rates = [len(names) * samples * tokens / each for names, each in zip(runs.values(), seconds)]
    for name, rate in zip(runs, rates):
        print(
            f"{name}: {rate:,.1f} sampled tokens/s ({rate / rates[0]:.2f} times one model), {samples} samples per call",
            flush=True,
        )


def profile(backend: LocalBackend, tokens: int, samples: int) -> None:
    """Print the operations of a pass of four models, joint and not, and of samples of one and of four models."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    calls = [PassCall(name, make_data(tokens, index), LossCall("cross_entropy")) for index, name in enumerate(NAMES)]
    # few tokens: what is recorded of a step takes a hundred megabytes
    asked = SampleCall(range(5, 13), max_tokens=4, num_samples=samples, seed=1, ends_at_eos=False)

    def record(title: str, work: Callable[[], object]) -> None:
        with recording(activities=[ProfilerActivity.CPU]) as recorded:
            work()
        averages = recorded.key_averages()
        print(title)
        print(averages.table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40), flush=True)

    def record_all(tenants: Any) -> None:
        for joined in {False, tenants._can_join_passes()}:
            tenants._joins_passes = joined
            record("joint passes" if joined else "one model after the other", lambda: tenants.run_passes(calls))
        samplers = [tenants.make_sampler(name) for name in NAMES]
        for count in (1, 4):

            def sample(count: int = count) -> None:
                for sampler in samplers[:count]:
                    tenants.start_sampling(sampler, asked)
                while tenants.is_sampling:
                    tenants.step_sampling()

            sample()
            record(f"samples of {count} models", sample)

    backend.submit(record_all).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4, help="samples per call")
    parser.add_argument("--only", choices=("steps", "samples"), help="measure only these")
    parser.add_argument("--exact", action="store_true", help="rl_config.exact_log_probs: samples independent of others by bits")
    parser.add_argument("--profile", action="store_true", help="show operations of passes and samples of four models too")
    arguments = parser.parse_args()

    async def measure(backend: LocalBackend, folder: Path) -> None:
        for index, name in enumerate(NAMES):
            await backend.create_model(name, AdapterSpec(32, seed=index))
        if arguments.only != "samples":
            await measure_steps(backend, folder, arguments.rounds, arguments.tokens)
        if arguments.only != "steps":
            await measure_samples(backend, arguments.rounds, arguments.tokens, arguments.samples)

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.size)
        backend = LocalBackend.open(run_config(Path(folder), arguments.tokens, arguments.exact))
        asyncio.run(measure(backend, Path(folder) / "serve"))
        if arguments.profile:
            profile(backend, arguments.tokens, arguments.samples)
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main()

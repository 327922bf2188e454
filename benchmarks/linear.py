"""Seconds of the driver's work with rows, requests, tokens and ranks, over a factor of 64, and the exponent of their growth.

    python benchmarks/linear.py
    python benchmarks/linear.py --works packing "weight sync plan"
    python benchmarks/linear.py --largest        # seconds and memory of the driver for the largest runs, a process for each

Nothing is generated or trained: the data are made up, and the servers are scripted. Seconds are of the processor. The exponent
belongs to a power through the times of the smallest and the largest size; 1 is linear. A size is repeated up to five times
within a second, and the fastest counts. Objects that were there before a work are frozen, as in the driver of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headline import Headline

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

#: times the smallest size
FACTORS = (1, 4, 16, 64)
LIMIT = 1.15


def dock(num_rows: int) -> float:
    """Rows of 16 samples come in parts, and requests for each group wait for them."""
    import torch

    from mindspeed_rl.dataplane.transfer_dock import TransferDock

    async def play() -> float:
        plane = TransferDock(num_rows // 16, 16, {"rollout": ["responses", "log_probs"], "trainer": []})
        values = [torch.arange(4)] * 16
        start = time.process_time()
        columns = ["responses", "log_probs"]
        requests = [asyncio.create_task(plane.wait("trainer", columns, 16, timeout_s=600.0)) for _ in range(num_rows // 16)]
        await asyncio.sleep(0)
        for first in range(0, num_rows, 16):
            rows = list(range(first, first + 16))
            for name in columns:
                plane.put({name: values}, rows)
            await asyncio.sleep(0)
        await asyncio.gather(*requests)
        return time.process_time() - start

    return asyncio.run(play())


def pool(num_requests: int, num_servers: int = 64) -> float:
    """Requests are given to servers."""
    from scripted_server import ScriptedServer

    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.serving.engine_pool import ServerPool

    async def play() -> float:
        servers = ServerPool(timeout_s=600.0)
        for number in range(num_servers):
            await servers.add(ScriptedServer(f"server {number}"))
        sampling = Sampling(temperature=1.0, max_tokens=1000, stop_token_ids=())
        start = time.process_time()
        tasks = [asyncio.create_task(servers.generate((1, 2), sampling, number)) for number in range(num_requests)]
        while servers.waiting or sum(len(member.requests) for member in servers._members.values()) < num_requests:
            await asyncio.sleep(0)
        seconds = time.process_time() - start
        for task in tasks:
            task.cancel()
        await servers.close()
        return seconds

    return asyncio.run(play())


def response(num_tokens: int) -> float:
    """A response arrives in events of one token."""
    from mindspeed_rl.rollout.protocol import Generated, GrowingResponse

    start = time.process_time()
    growing = GrowingResponse(Generated())
    for token in range(num_tokens):
        growing.add((token,), (-0.5,), 1, None)
    assert len(growing.freeze().token_ids) == num_tokens
    return time.process_time() - start


def packing(num_rows: int) -> float:
    """Rows of 100 to 4,000 tokens are packed into micro-batches of 8,192."""
    from mindspeed_rl.engine.balance import pack_within_budget

    source = random.Random(0)
    lengths = [source.randint(100, 4000) for _ in range(num_rows)]
    start = time.process_time()
    pack_within_budget(lengths, 8192)
    return time.process_time() - start


def sync_plan(num_ranks: int) -> float:
    """The plan of a weight sync of 7B from TP4 PP2 to engines of TP2 on the same ranks, with their slices."""
    from mindspeed_rl.models import architecture_for
    from mindspeed_rl.models.layout import Layout
    from mindspeed_rl.resharding.layouts import InferenceLayout, rank_positions, training_slices
    from mindspeed_rl.resharding.transfer_plan import TensorInfo, plan_transfer

    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    architecture = architecture_for(config)
    ops = architecture.weight_ops(architecture.read_model_config(config))
    tensors = [TensorInfo(name, shape, 2) for op in ops for name, shape in zip(op.hf, op.shapes)]
    start = time.process_time()
    layout = Layout(num_layers=28, tp=4, pp=2)
    held = training_slices(ops, layout, rank_positions(layout, num_ranks))
    needed = InferenceLayout(2, num_ranks // 2).list_slices(ops)
    plan_transfer(tensors, held, needed, bucket_bytes=512 << 20, find_node=lambda rank: rank // 16)
    return time.process_time() - start


def largest_sync_plan(num_ranks: int) -> float:
    """The plan of a weight sync of 671B from TP2 PP8 EP16 to engines of TP4 EP64 on the same ranks, with their slices."""
    from resharding import CLUSTERS

    from mindspeed_rl.models import architecture_for
    from mindspeed_rl.models.layout import Layout
    from mindspeed_rl.resharding.layouts import InferenceLayout, rank_positions, training_slices
    from mindspeed_rl.resharding.transfer_plan import TensorInfo, plan_transfer

    cluster = CLUSTERS[-1]
    architecture = architecture_for(cluster.config)
    model = architecture.read_model_config(cluster.config)
    ops = architecture.weight_ops(model)
    tensors = [TensorInfo(name, shape, 2) for op in ops for name, shape in zip(op.hf, op.shapes)]
    experts = model.num_moe_experts or 0
    start = time.process_time()
    layout = Layout(num_layers=model.num_layers, num_experts=experts, **cluster.train)
    held = training_slices(ops, layout, rank_positions(layout, num_ranks))
    engines = InferenceLayout(**(cluster.infer | {"replicas": num_ranks // 4}))
    needed = engines.list_slices(ops, num_experts=experts)
    plan_transfer(tensors, held, needed, bucket_bytes=512 << 20, find_node=lambda rank: rank // 16)
    return time.process_time() - start


def watch(num_iterations: int) -> float:
    """A page that follows a run reads one more iteration, of 20 metrics, and makes its figures; times the iterations of a run.

    What is measured is one look at the end of a run; a page rests twenty times as long after each.
    """
    from mindspeed_rl.observability.page import collect_figures
    from mindspeed_rl.observability.run_files import FollowedRun

    names = [f"part/metric_{number}" for number in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")

        def line(iteration: int) -> str:
            return json.dumps({"iteration": iteration} | {name: iteration * 0.5 for name in names}) + "\n"

        path.write_text("".join(map(line, range(1, num_iterations))))
        followed = FollowedRun(Path(folder))
        collect_figures([followed.read()])
        with path.open("a") as stream:
            stream.write(line(num_iterations))
        start = time.process_time()
        collect_figures([followed.read()])
        return time.process_time() - start


#: work -> (what is done, what is counted, smallest size)
WORKS: dict[str, tuple[Callable[[int], float], str, int]] = {
    "data plane": (dock, "rows", 1024),
    "server pool": (pool, "requests", 256),
    "one response": (response, "tokens", 2048),
    "packing": (packing, "rows", 1024),
    "weight sync plan": (sync_plan, "ranks", 64),
    "watch": (watch, "iterations", 1024),
}


#: work -> (what is done, what is counted, size of the largest run, a size for compilers and imports)
LARGEST: dict[str, tuple[Callable[[int], float], str, int, int]] = {
    "data plane": (dock, "rows", 65_536, 64),
    "server pool of 256 engines": (partial(pool, num_servers=256), "requests", 65_536, 256),
    "one response": (response, "tokens", 131_072, 64),
    "packing": (packing, "rows", 65_536, 64),
    "weight sync plan of 671B, once": (largest_sync_plan, "ranks", 4096, 256),
    "watch, a new iteration": (watch, "iterations before", 100_000, 64),
}


def read_memory(name: str) -> float:
    """Return a figure of this process's memory in MiB, VmRSS or VmHWM."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def measure_largest(name: str) -> tuple[float, float]:
    """Return the processor seconds, and the MiB in excess of the smallest size."""
    work, _, size, smallest = LARGEST[name]
    work(smallest)
    gc.collect()
    gc.freeze()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read_memory("VmRSS")
    return work(size), read_memory("VmHWM") - before


def print_largest() -> None:
    """Print a row for each work."""
    print("| work | size | seconds | MiB |\n|---|---:|---:|---:|")
    context = multiprocessing.get_context("spawn")
    for name, (_, counted, size, _) in LARGEST.items():
        with context.Pool(1) as processes:
            seconds, memory = processes.apply(measure_largest, (name,))
        print(f"| {name} | {size:,} {counted} | {seconds:.3g} | {memory:,.0f} |", flush=True)


def measure(work: Callable[[int], float], size: int) -> float:
    """The fastest of the rounds of a size."""
    seconds = [work(size)]
    while sum(seconds) < 1.0 and len(seconds) < 5:
        seconds.append(work(size))
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--largest", action="store_true")
    arguments = parser.parse_args()
    if arguments.largest:
        print_largest()
        return
    print("| work | " + " | ".join(f"x {factor}, s" for factor in FACTORS) + " | exponent |\n|---" + "|---:" * 5 + "|")
    for name in arguments.works:
        work, counted, smallest = WORKS[name]
        # compilers and imports are not part of a size
        work(smallest * FACTORS[-1] if name == "weight sync plan" else smallest)
        gc.collect()
        gc.freeze()  # as `trainers.launch` does
        seconds = [measure(work, smallest * factor) for factor in FACTORS]
        exponent = math.log(seconds[-1] / seconds[0], FACTORS[-1])
        cells: list[Any] = [f"{name}, {smallest:,} {counted}", *(f"{value:.3g}" for value in seconds), f"{exponent:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        Headline(f"exponent of {name} over {smallest * FACTORS[-1]:,} {counted}", f"{exponent:.2f}", "aim", f"{LIMIT}").say()


if __name__ == "__main__":
    main()

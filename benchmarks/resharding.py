"""What a weight push costs: bytes, seconds and memory, beside gathering every tensor on every rank; and plans of real models.

    python benchmarks/resharding.py measure --processes 2 4 --millions 10 100 300
    python benchmarks/resharding.py fingerprints --millions 30 100 300
    python benchmarks/resharding.py plans
    python benchmarks/resharding.py servers --millions 100

`measure` starts processes that hold training shards and a model of an engine's layout (tests/engine_model.py), pushes both ways
and prints a row a layout. Seconds are of the clock and, behind a slash, of the processor, which other work on the machine moves
less. Peaks are of resident memory above what was resident before. `plans` moves nothing: it prints what the planner says of
models and clusters. `fingerprints` compares both passes of the proof (training shards, engine) with sums that do not see the
order of the elements, as they were before: seconds of the processor, in turn, in one process. `servers` sends the weights of
one trainer to 1, 2 and 4 engines on other ranks: from the trainer to each, and passed on from one to another, in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headline import Headline

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dist")]

PUSHES = 5
#: devices of a machine
NODE = 16
#: processes -> name, training sizes, inference tensor ranks
LAYOUTS = {
    2: [("TP2 -> TP2", {"tp": 2}, 2), ("TP2 -> TP1 x 2", {"tp": 2}, 1), ("PP2 -> TP2", {"pp": 2}, 2)],
    4: [("TP2 PP2 -> TP1 x 4", {"tp": 2, "pp": 2}, 1), ("TP4 -> TP2 x 2", {"tp": 4}, 2)],
}
#: millions of parameters -> hidden, FFN, layers
SIZES = {10: (320, 864, 6), 30: (512, 1408, 8), 100: (768, 2112, 12), 300: (1024, 2752, 22)}


def config_of(millions: int) -> dict[str, Any]:
    hidden, ffn, layers = SIZES[millions]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip


# ---------------------------------------------------------------------- measured


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory; with `peak` the most since `forget_peak`."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(wanted))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@dataclass(frozen=True)
class Cost:
    """Medians of a few rounds that all processes begin together; `growth` is the largest one of memory, in bytes."""

    seconds: float
    cpu_s: float
    growth: int


def timed(work: Callable[[], object]) -> Cost:
    """What work costs this process, waiting for the others included."""
    import torch.distributed as dist

    seconds, cpu_s, growth = [], [], 0
    for _ in range(PUSHES):
        forget_peak()
        before = resident()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        work()
        cpu_s.append(time.process_time() - cpu_start)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        growth = max(growth, resident(peak=True) - before)
    return Cost(statistics.median(seconds), statistics.median(cpu_s), growth)


def measured(rank: int, processes: int, port: int, millions: int, layout: int, bucket_mb: int, results: Any) -> None:
    """One process's part of a measurement."""
    join_gloo(rank, processes, port)
    import torch
    from push_jobs import Case, Side, weights_of

    _, train, infer_tp = LAYOUTS[processes][layout]
    case = Case(config_of(millions), train, infer_tp, bucket_bytes=bucket_mb << 20, dtype=torch.bfloat16)
    side = Side(case)
    assert side.engine is not None
    side.train(weights_of(side.ops, 0, torch.bfloat16))
    engine = side.engine
    side.push.write(engine)  # the first messages between two processes are slow
    push = timed(lambda: side.push.write(engine))
    proof = timed(lambda: side.push.prove(engine))
    gather = timed(lambda: engine.load_weights(gathered(side)))
    side.push.prove(engine)  # both ways end alike
    received = side.push.received_bytes
    whole = sum(torch.Size(shape).numel() * 2 for shape in side.trained.shapes.values())
    row = {"push": push, "proof": proof, "gather": gather, "received": received, "bound": bound(side, rank), "whole": whole}
    report(row, results)


def join_gloo(rank: int, processes: int, port: int) -> None:
    """Make this process a rank of a measurement, on one thread."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def report(row: Any, results: Any) -> None:
    """Hand the rows of all ranks over, from the first one, and leave the measurement."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, row)
    if dist.get_rank() == 0:
        results.put(everyone)
    dist.barrier()
    dist.destroy_process_group()


def bound(side: Any, rank: int) -> int:
    """Bytes that this rank's engine needs and its shards do not hold, counted element by element from the two layouts."""
    import torch

    missing = 0
    for name, shape in side.trained.shapes.items():
        wanted = torch.zeros(shape, dtype=torch.bool)
        for tensor, tensor_slice in side.destinations.needs():
            if tensor == name:
                wanted[tuple(slice(*edge) for edge in tensor_slice)] = True
        for tensor_slice, ranks in side.trained.holders[name].items():
            if rank in ranks:
                wanted[tuple(slice(*edge) for edge in tensor_slice)] = False
        missing += int(wanted.sum()) * 2
    return missing


def gathered(side: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor whole on every rank: gathered over the tensor ranks, then broadcast from the stage that holds it."""
    import torch
    import torch.distributed as dist

    from mindspeed_rl.resharding.layouts import _find_stage

    mine = {shard.op.mcore: shard for shard in side.shards}
    groups = groups_of(side)
    for op in side.ops:
        stage = _find_stage(op, side.layout)
        shape = op.shard_shape(side.layout.tp)
        shards = torch.empty(side.layout.tp, *shape, dtype=side.case.dtype)
        if op.mcore in mine:
            dist.all_gather_into_tensor(shards.view(-1), mine[op.mcore].tensor.reshape(-1), group=groups["tensor"])
        if side.layout.pp > 1:
            source = dist.get_global_rank(groups["stages"], stage)
            dist.broadcast(shards, src=source, group=groups["stages"])
        yield from op.shards_to_hf([*shards] if any(split.dim is not None for split in op.splits) else [shards[0]]).items()


_GROUPS: dict[str, Any] = {}


def groups_of(side: Any) -> dict[str, Any]:
    """The process groups of a tensor-parallel replica's stage and of its pipeline."""
    import torch.distributed as dist

    if not _GROUPS:
        places = side.places
        for kind, key in (("tensor", lambda place: place.pp), ("stages", lambda place: place.tp)):
            for value in sorted({key(place) for place in places}):
                ranks = [rank for rank, place in enumerate(places) if key(place) == value]
                group = dist.new_group(ranks)
                if side.exchange.rank in ranks:
                    _GROUPS[kind] = group
    return _GROUPS


def measure(processes: list[int], millions: list[int], bucket_mb: int) -> None:
    context = multiprocessing.get_context("spawn")
    columns = (
        "layout", "parameters", "received, MB a rank", "/ bound", "/ whole model", "push s", "proof s", "proof / push",
        "gather s", "peak push MB", "peak gather MB",
    )  # fmt: skip
    print(heading(columns))
    for count in processes:
        for number, (name, _, _) in enumerate(LAYOUTS[count]):
            for size in millions:
                rows = run_together(context, measured, count, (size, number, bucket_mb))
                print(table_row(name, size, rows), flush=True)
                ours = max(row["push"].seconds for row in rows) + max(row["proof"].seconds for row in rows)
                gather = max(row["gather"].seconds for row in rows)
                what = f"weight push with its proof, {name}, {size} M parameters, s"
                Headline(what, f"{ours:.3f}", "gathering every tensor, no proof", f"{gather:.3f}", gather / ours).say()


def served(rank: int, processes: int, port: int, millions: int, bucket_mb: int, results: Any) -> None:
    """One process's part of a push from one trainer to engines on other ranks."""
    join_gloo(rank, processes, port)
    import torch
    from push_jobs import Case, Side, weights_of

    from mindspeed_rl.resharding.push import WeightPush

    case = Case(config_of(millions), {}, 1, bucket_bytes=bucket_mb << 20, dtype=torch.bfloat16, train_ranks=1)
    side = Side(case)
    if rank == 0:
        side.train(weights_of(side.ops, 0, torch.bfloat16))
    row: dict[str, Any] = {}
    for name, relays in (("direct", False), ("relayed", True)):
        push = WeightPush(side.trained, side.destinations, side.exchange, replica=rank, relays=relays)
        push.write(side.engine)
        push.prove(side.engine)
        cost = timed(partial(push.write, side.engine))
        row[name] = cost.seconds, push.plan.moves.bytes_by_rank("source"), push.received_bytes, push.plan.num_buckets
    report(row, results)


def servers(millions: int, bucket_mb: int) -> None:
    columns = ("engines", "way", "sent by the trainer, MB", "by an engine at most", "received by an engine", "buckets", "s")
    print(heading(columns))
    context = multiprocessing.get_context("spawn")
    for count in (1, 2, 4):
        rows = run_together(context, served, count + 1, (millions, bucket_mb))
        for way in ("direct", "relayed"):
            _, sent, _, buckets = rows[0][way]
            seconds, received = max(row[way][0] for row in rows), rows[1][way][2]
            most = max([size for rank, size in sent.items() if rank], default=0)
            sizes = [f"{size / 1e6:.1f}" for size in (sent[0], most, received)]
            print("| " + " | ".join([str(count), way, *sizes, str(buckets), f"{seconds:.3f}"]) + " |", flush=True)


def run_together(context: Any, work: Callable[..., None], count: int, arguments: tuple[Any, ...]) -> list[Any]:
    """Run a measurement in processes of its own and return the row of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.SimpleQueue()
    started = [
        context.Process(target=work, args=(rank, count, port, *arguments, results), daemon=True) for rank in range(count)
    ]
    for process in started:
        process.start()
    rows = results.get()
    for process in started:
        process.join(60)
    return rows


def heading(columns: tuple[str, ...]) -> str:
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def table_row(name: str, size: int, rows: list[dict[str, Any]]) -> str:
    mb = 1e6
    received, lowest = sum(row["received"] for row in rows), sum(row["bound"] for row in rows)
    ratio = f"{received / lowest:.3f}" if lowest else "0 / 0"
    clock, cpu = (
        {kind: max(getattr(row[kind], field) for row in rows) for kind in ("push", "proof", "gather")}
        for field in ("seconds", "cpu_s")
    )
    times = {kind: f"{clock[kind]:.3f} / {cpu[kind]:.3f}" for kind in clock}
    part = f"{clock['proof'] / clock['push']:.2f} / {cpu['proof'] / cpu['push']:.2f}"
    peaks = [f"{max(row[kind].growth for row in rows) / mb:.0f}" for kind in ("push", "gather")]
    share = received / sum(row["whole"] for row in rows)
    cells = [name, f"{size} M", f"{received / len(rows) / mb:.1f}", ratio, f"{share:.2f}", times["push"], times["proof"], part]
    cells += [times["gather"], *peaks]
    return "| " + " | ".join(cells) + " |"


# ---------------------------------------------------------------------- fingerprints


def blind_sums() -> Callable[[list[Any], list[Any]], None]:
    """The sum of x (x + C) over bits, by compiled loops: what the proof compared when it did not see the order of elements."""
    import numba
    import numpy as np

    from mindspeed_rl.resharding.compiled_sums import _pointer

    @numba.njit(nogil=True)
    def loop(tensors: Any, like: Any, totals: Any) -> None:
        for index in range(tensors.shape[0]):
            address, rows, step, columns = tensors[index]
            memory = numba.carray(_pointer(address), ((rows - 1) * step + columns,), like.dtype)
            plain, squares = np.int64(0), np.int64(0)
            for row in range(rows):
                line = memory[row * step : row * step + columns]
                for column in range(line.size):
                    x = np.int64(line[column])
                    plain += x
                    squares += x * x
            totals[index] += squares + plain * np.int64(0x1E3779B97F4A7C15)

    like = {2: np.empty(0, np.int16), 4: np.empty(0, np.int32)}

    def blind(*passes: list[Any]) -> None:
        for views in passes:
            rows, waiting = [], 0
            for view in views:
                flat = view if view.dim() == 2 and view.stride(1) == 1 else view.contiguous()
                height, step, width = (
                    (1, flat.numel(), flat.numel()) if flat.is_contiguous() else (len(flat), flat.stride(0), flat.size(1))
                )
                rows.append((flat.data_ptr(), height, step, width))
                waiting += flat.nbytes
                if waiting >= 1 << 22:
                    loop(np.array(rows, np.int64), like[flat.element_size()], np.zeros(len(rows), np.int64))
                    rows, waiting = [], 0
            if rows:
                loop(np.array(rows, np.int64), like[flat.element_size()], np.zeros(len(rows), np.int64))

    return blind


def _sum_blind(blind: Callable[..., None], sources: Any, chunks: list[Any], parameters: dict[str, Any]) -> None:
    blind([view for chunk in chunks for _, view in sources.views(*chunk)], list(parameters.values()))


def _sum_positions(sources: Any, chunks: list[Any], destinations: Any, parameters: dict[str, Any]) -> None:
    from mindspeed_rl.resharding.bit_sums import sum_groups

    sum_groups(sources.views(*chunk) for chunk in chunks)
    sum_groups([share[2:]] for share in destinations.list_shares(parameters, {}))


def fingerprints(millions: list[int]) -> None:
    """Prints the seconds of both kinds of sums over the training shards and the engine of dense models and one with experts."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
    import torch
    import torch.distributed as dist
    from push_jobs import Case, Side, weights_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    blind = blind_sums()
    experts = CLUSTERS[1].config | {
        "hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 4, "num_experts": 32, "num_attention_heads": 16,
        "vocab_size": 4096, "head_dim": 64,
    }  # fmt: skip
    cases = [(f"dense, {size} M, {str(dtype)[6:]}", Case(config_of(size), {}, 1, bucket_bytes=64 << 20, dtype=dtype))
             for size in millions for dtype in (torch.bfloat16, torch.float32)]  # fmt: skip
    cases.append(("32 experts, 180 M, bfloat16", Case(experts, {}, 1, bucket_bytes=64 << 20, dtype=torch.bfloat16)))
    print(heading(("model", "parameters of the engine", "slices", "order not seen, s", "positions, s", "ratio")))
    for name, case in cases:
        side = Side(case)
        assert side.engine is not None and side.trained.sources is not None
        side.train(weights_of(side.ops, 0, case.dtype))
        side.push.write(side.engine)
        chunks = [(side.push.plan.tensors[chunk.tensor].name, chunk.tensor_slice) for chunk in side.push.plan.chunks]
        parameters = {key: value.data for key, value in side.engine.named_parameters()}

        sources, found = side.trained.sources, side.destinations
        works: tuple[Callable[[], object], ...] = (
            partial(_sum_blind, blind, sources, chunks, parameters),
            partial(_sum_positions, sources, chunks, found, parameters),
        )
        seconds: tuple[list[float], ...] = ([], [])
        for turn in range(12):
            for work, times in zip(works, seconds):
                start = time.process_time()
                work()
                if turn > 1:  # compiled by then
                    times.append(time.process_time() - start)
        before, after = (statistics.median(times) for times in seconds)
        print(f"| {name} | {len(parameters)} | {len(chunks)} | {before:.4f} | {after:.4f} | {after / before:.2f} |", flush=True)
    dist.destroy_process_group()


# ---------------------------------------------------------------------- computed


@dataclass(frozen=True)
class Cluster:
    """A model and where it trains and generates."""

    name: str
    config: dict[str, Any]
    train: dict[str, Any]
    world: int
    infer: dict[str, Any]


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
CLUSTERS = (
    Cluster(
        "Qwen2.5-32B, TP8 PP2 -> TP4 x 4, 16 devices",
        _COMMON | {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
            "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        {"tp": 8, "pp": 2}, 16, {"tp": 4, "replicas": 4},
    ),
    Cluster(
        "Qwen3-235B-A22B, PP4 EP16 -> TP4 EP8 x 8, 64 devices",
        _COMMON | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128,
            "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
            "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
        {"pp": 4, "ep": 16, "num_layer_list": (24, 24, 23, 23)}, 64,
        {"tp": 4, "replicas": 16, "expert_parallel": True, "sharing": 2},
    ),
    Cluster(
        "DeepSeek-V3, TP2 PP8 EP16 -> TP4 EP64 x 4, 256 devices",
        _COMMON | {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "vocab_size": 129280, "tie_word_embeddings": False, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
            "moe_layer_freq": 1, "attention_bias": False, "num_nextn_predict_layers": 0,
        },
        {"tp": 2, "pp": 8, "ep": 16, "etp": 1, "num_layer_list": (8, 8, 8, 8, 8, 7, 7, 7)}, 256,
        {"tp": 4, "replicas": 64, "expert_parallel": True, "sharing": 16},
    ),
)  # fmt: skip


def plans(bucket_mb: int) -> None:
    """Prints what the planner says of each cluster."""
    from mindspeed_rl.models import architecture_for
    from mindspeed_rl.models.layout import Layout
    from mindspeed_rl.resharding.layouts import (
        InferenceLayout,
        full_slice,
        num_elements,
        rank_positions,
        training_slices,
    )
    from mindspeed_rl.resharding.transfer_plan import TensorInfo, plan_transfer

    columns = (
        "model and layouts", "model, GB", "engine, GB a device", "received, GB a device: mean, max", "sent: max",
        "/ gather all", "exchanges", "plan s",
    )  # fmt: skip
    print(heading(columns))
    for cluster in CLUSTERS:
        architecture = architecture_for(cluster.config)
        model_config = architecture.read_model_config(cluster.config)
        experts = model_config.num_moe_experts or 0
        layout = Layout(num_layers=model_config.num_layers, num_experts=experts, **cluster.train)
        ops = architecture.weight_ops(model_config)
        shapes = {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}
        tensors = [TensorInfo(name, shape, 2) for name, shape in shapes.items()]
        held = training_slices(ops, layout, rank_positions(layout, cluster.world))
        needed = InferenceLayout(**cluster.infer).list_slices(ops, num_experts=experts)
        start = time.perf_counter()
        plan = plan_transfer(tensors, held, needed, bucket_bytes=bucket_mb << 20, find_node=lambda rank: rank // NODE)
        seconds = time.perf_counter() - start
        model = sum(2 * num_elements(full_slice(shape)) for shape in shapes.values())
        share = [0] * cluster.world
        for slices in needed.values():
            for tensor_slice, ranks in slices.items():
                for rank in ranks:
                    share[rank] += 2 * num_elements(tensor_slice)
        received, sent, gb = plan.moves.bytes_by_rank("target"), plan.moves.bytes_by_rank("source"), 1e9
        mean = sum(received.values()) / cluster.world
        # every rank gets every tensor but for the shard of each that it holds
        kept = [0] * cluster.world
        for slices in held.values():
            for tensor_slice, ranks in slices.items():
                for rank in ranks:
                    kept[rank] += 2 * num_elements(tensor_slice)
        everything = sum(model - own for own in kept) / cluster.world
        cells = [
            cluster.name, f"{model / gb:.0f}", f"{max(share) / gb:.2f}", f"{mean / gb:.2f}, {max(received.values()) / gb:.2f}",
            f"{max(sent.values()) / gb:.2f}", f"{mean / everything:.4f}", str(plan.num_buckets), f"{seconds:.1f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    command.add_argument("--processes", type=int, nargs="+", default=[2, 4], choices=list(LAYOUTS))
    command.add_argument("--millions", type=int, nargs="+", default=[10, 100, 300], choices=list(SIZES))
    commands.add_parser("fingerprints").add_argument(
        "--millions", type=int, nargs="+", default=[30, 100, 300], choices=list(SIZES)
    )
    commands.add_parser("plans")
    several = commands.add_parser("servers")
    several.add_argument("--millions", type=int, default=100, choices=list(SIZES))
    for each in commands.choices.values():
        each.add_argument("--bucket-mb", type=int, default={command: 64, several: 8}.get(each, 512))
    arguments = parser.parse_args()
    if arguments.command == "fingerprints":
        fingerprints(arguments.millions)
    elif arguments.command == "plans":
        plans(arguments.bucket_mb)
    elif arguments.command == "servers":
        servers(arguments.millions, arguments.bucket_mb)
    else:
        measure(arguments.processes, arguments.millions, arguments.bucket_mb)


if __name__ == "__main__":
    main()

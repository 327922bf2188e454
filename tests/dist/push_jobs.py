"""Pushes from training shards into models of an engine's layout; neither Megatron nor vLLM is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from engine_model import EngineModel, EngineRank
from torch import Tensor

from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.weights import MemorySource, WeightOp
from mindspeed_rl.resharding.destinations import Destinations, read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import _find_stage, rank_positions, training_slices
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.quantization import quantize_side, stored_dtypes
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer import Sources


@dataclass(frozen=True)
class Shard:
    """A training shard without a model around it; has the attributes of `engine.weights.LocalWeight`."""

    op: WeightOp
    tensor: Tensor
    num_shards: int
    shard: int
    merged: None = None

    @property
    def is_computed(self) -> bool:
        return self.op.packing.copies

    def value(self) -> Tensor:
        return self.tensor


@dataclass
class Case:
    """A model, its training layout and its engine's.

    Attributes:
        config: config.json.
        train: sizes of Layout.
        train_ranks: of the first ranks; all of them train where it is None.
        disjoint: the engines are on the ranks that do not train.
    """

    config: dict[str, Any]
    train: dict[str, Any]
    infer_tp: int
    expert_ranks: int = 1
    train_ranks: int | None = None
    grouped: bool = False
    transposed: bool = False
    dealt: bool = False
    delta: bool = False
    bucket_bytes: int = 6000
    dtype: torch.dtype = torch.float32
    updates: int = 3
    quantization: str | None = None
    keywords: dict[str, Any] = field(default_factory=dict)


class Tampering(Exchange):
    """Loses, repeats, delays or damages one exchange's bytes on their way into this rank."""

    fault = ""
    count = 0
    before: Tensor | None = None

    def start(self, send: Tensor, send_sizes: list[int], receive: Tensor, receive_sizes: list[int]) -> dist.Work:
        self.count += 1
        stale = receive.clone() if self.fault == "dropped" else None
        work = super().start(send, send_sizes, receive, receive_sizes)
        work.wait()
        if self.count == 2 and receive.numel():
            if self.fault == "dropped":
                assert stale is not None
                receive.copy_(stale)
            if self.fault == "repeated" and self.before is not None:
                size = min(receive.numel(), self.before.numel())
                receive[:size].copy_(self.before[:size])
            if self.fault == "corrupted":
                receive[receive.numel() // 2] ^= 1
        self.before = receive.clone()
        return work


def weights_of(ops: list[WeightOp], update: int, dtype: torch.dtype, frozen: str = "\n") -> dict[str, Tensor]:
    """All HF tensors after an update; those with `frozen` in their name never change."""
    results = {}
    for op in ops:
        for name, shape in zip(op.hf, op.shapes):
            seed = sum(ord(letter) * 31**place % 65521 for place, letter in enumerate(name))
            generator = torch.Generator().manual_seed(seed + (0 if frozen in name else 7919 * update))
            results[name] = torch.randn(shape, generator=generator).to(torch.float32 if op.buffer else dtype)
    return results


def in_int8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of layers by the definition of int8 with a scale a row, and those scales; the others as they are."""
    results = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scales = torch.stack([row.abs().max() / 127 for row in tensor.float()])[:, None]
            results[name] = torch.stack([(row / scale).round() for row, scale in zip(tensor.float(), scales)]).to(torch.int8)
            results[f"{name}_scale"] = scales
        else:
            results[name] = tensor
    return results


def in_mxfp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same by the definition of MXFP8: of 32 neighbours 2^(floor(log2(largest)) - 8), and E4M3 of the quotients."""
    results = {}
    for name, tensor in tensors.items():
        results[name] = tensor
        if name.endswith("_proj.weight"):
            blocks = tensor.double().reshape(len(tensor), -1, 32)
            exponents = blocks.abs().amax(-1).log2().floor() - 8
            elements = (blocks / 2 ** exponents[..., None]).clamp(-448, 448).float().to(torch.float8_e4m3fn)
            results[name] = elements.view(torch.uint8).reshape(tensor.shape)
            results[f"{name}_scale"] = (exponents + 127).to(torch.uint8)
    return results


def in_w4a8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same by the definition of int4 with a scale of 32 neighbours; the element with the even index is in the low bits."""
    results = {}
    for name, tensor in tensors.items():
        results[name] = tensor
        if name.endswith("_proj.weight"):
            blocks = tensor.float().reshape(len(tensor), -1, 32)
            scales = blocks.abs().amax(-1) / 7
            numbers = (blocks / scales[..., None]).round().int().reshape(tensor.shape) % 16
            results[name] = (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8)
            results[f"{name}_scale"] = scales
    return results


BY_DEFINITION = {"int8": in_int8, "mxfp8": in_mxfp8, "w4a8": in_w4a8}


class Side:
    """One rank's training shards and engine, as the case says; without `meets` there is no push between them."""

    def __init__(self, case: Case, exchange: Exchange | None = None, *, meets: bool = True) -> None:
        self.case = case
        architecture = architecture_for(case.config)
        model_config = architecture.read_model_config(case.config)
        num_experts = model_config.num_moe_experts or 0
        self.layout = Layout(num_layers=model_config.num_layers, num_experts=num_experts, **case.train)
        packing = ExpertPacking("grouped", self.layout.num_expert_groups) if case.grouped else None
        self.ops = architecture.weight_ops(model_config, packing)
        self.exchange = exchange or Exchange.from_world()
        rank, world = self.exchange.rank, self.exchange.size
        trainers = case.train_ranks or world
        self.places = rank_positions(self.layout, trainers)
        self.shards = self._make_shards(rank) if rank < trainers else []
        shapes = {name: shape for op in self.ops for name, shape in zip(op.hf, op.shapes)}
        held = training_slices(self.ops, self.layout, self.places)
        sources = Sources(self.shards, {}) if self.shards else None
        self.trained = TrainedWeights(held, shapes, sources, torch.device("cpu"), case.bucket_bytes)
        if case.quantization is not None:
            self.trained = quantize_side(self.trained, case.quantization)
            shapes = dict(self.trained.shapes)
        self.engine: EngineModel | None = None
        result: Destinations | None = None
        first = case.train_ranks or 0
        self.replica = (rank - first) // max(case.infer_tp, case.expert_ranks)
        if rank >= first:
            at = EngineRank(
                case.infer_tp,
                (rank - first) % case.infer_tp,
                model_config.num_attention_heads,
                model_config.num_query_groups,
                num_experts,
                case.expert_ranks,
                (rank - first) % case.expert_ranks,
                case.transposed,
                case.dealt,
                case.quantization,
            )
            self.engine, self.reference = EngineModel(shapes, at, case.dtype), EngineModel(shapes, at, case.dtype)
            stored = stored_dtypes(self.trained.quantized, case.quantization)
            result = read_destinations(self.engine, self.engine.load_weights, shapes, case.dtype, stored=stored)
        self.destinations = result
        if meets:
            self.push = WeightPush(self.trained, result, self.exchange, replica=self.replica, delta=case.delta)

    def _make_shards(self, rank: int) -> list[Any]:
        place, results = self.places[rank], []
        empty = MemorySource({name: torch.zeros(shape) for op in self.ops for name, shape in zip(op.hf, op.shapes)})
        for op in self.ops:
            count, index = (self.layout.expert_tp_size, place.etp) if op.axis == "etp" else (self.layout.tp, place.tp)
            mine = not op.experts or op.experts[0] // self.layout.experts_per_group == place.experts
            if _find_stage(op, self.layout) == place.pp and mine:
                dtype = torch.float32 if op.buffer else self.case.dtype
                results.append(Shard(op, op.read_shard(empty, count, index).to(dtype).clone(), count, index))
        return results

    def train(self, tensors: dict[str, Tensor]) -> None:
        """The shards belong to these tensors."""
        source = MemorySource(tensors)
        for shard in self.shards:
            shard.tensor.copy_(shard.op.read_shard(source, shard.num_shards, shard.shard))

    def differing(self, tensors: dict[str, Tensor]) -> list[str]:
        """Parameters that are not, bit for bit, what the engine's loader makes of the whole tensors."""
        if self.engine is None:
            return []
        self.reference.load_weights(tensors.items())
        held, wanted = dict(self.engine.named_parameters()), dict(self.reference.named_parameters())
        results = []
        for name, value in held.items():
            ours, theirs = value.data, wanted[name].data
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # what pads the vocabulary is nobody's weight
                real = next(iter(tensors.values())).shape[0] - self.push_rank() * ours.shape[0]
                ours, theirs = ours[: max(0, real)], theirs[: max(0, real)]
            if not torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
                results.append(name)
        return results

    def push_rank(self) -> int:
        """This rank's place in its replica."""
        return (self.exchange.rank - (self.case.train_ranks or 0)) % self.case.infer_tp


def _world() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def deliver(case: Case) -> dict[str, Any]:
    """What each of several pushes left in the engine, and what it cost."""
    _world()
    try:
        side = Side(case)
        report: dict[str, Any] = {"differing": [], "proven": [], "received": []}
        for update in range(case.updates):
            tensors = weights_of(side.ops, update, case.dtype, **case.keywords)
            side.train(tensors)
            if case.quantization is not None:
                tensors = BY_DEFINITION[case.quantization](tensors)
            side.push.write(side.engine)
            report["differing"].append(side.differing(tensors))
            report["proven"].append(side.push.prove(side.engine).num_parameters)
            report["received"].append(side.push.received_bytes)
        report["parameters"] = 0 if side.engine is None else len(dict(side.engine.named_parameters()))
        report["loaded whole"] = sorted(side.destinations.loaded) if side.destinations else []
        report["needed"] = side.push.needed_bytes
        report["planned"] = side.push.plan.moves.bytes_by_rank("target").get(side.exchange.rank, 0)
        dist.barrier()
        return report
    finally:
        dist.destroy_process_group()


def tamper(case: Case, faults: list[str]) -> dict[str, str]:
    """What the proof says after each fault, and after the push that follows it."""
    _world()
    try:
        exchange = Tampering(dist.group.WORLD)
        side = Side(case, exchange)
        said = {}
        update = 0
        for fault in faults:
            for name, kind in ((fault, fault), (f"after {fault}", "")):
                update += 1
                side.train(weights_of(side.ops, update, case.dtype))
                exchange.fault, exchange.count, exchange.before = kind, 0, None
                if kind != "stale":  # a push that never happened
                    side.push.write(side.engine)
                try:
                    side.push.prove(side.engine)
                    said[name] = "nothing"
                except WeightDeliveryError as error:
                    said[name] = str(error)
        dist.barrier()
        return said
    finally:
        dist.destroy_process_group()

"""Tensors of one phase on one rank: a safetensors file and an index of names, ranks, shapes and statistics.

`MsprobeRecord` writes the same tensors in the form of MindStudio's msprobe, which its own comparison reads.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rl.files import write_file


@dataclass(frozen=True)
class Cut:
    """The part of a full tensor that a rank has.

    Attributes:
        dim: dimension that is cut.
        shard, count: index of this part, and number of parts.
        blocks: rows of the part in each block of the full tensor along `dim`, where every block is cut; empty for one block.
        size: rows of the full tensor along `dim` where the last part is shorter (a padded vocabulary); 0 where it is not.
    """

    dim: int
    shard: int
    count: int
    blocks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor, as the index has them. Numbers that are not finite are counted, and left out of the others."""

    size: int
    not_finite: int
    least: float
    most: float
    mean: float
    norm: float

    @classmethod
    def compute(cls, tensor: Tensor) -> Statistics:
        """Compute the statistics of all elements; the norm is the Euclidean one, summed in float64."""
        values = tensor.detach().flatten().to(torch.float64)
        finite = values[torch.isfinite(values)]
        if not finite.numel():
            return cls(values.numel(), values.numel(), 0.0, 0.0, 0.0, 0.0)
        low, high = finite.aminmax()
        missing = values.numel() - finite.numel()
        return cls(values.numel(), missing, low.item(), high.item(), finite.mean().item(), finite.norm().item())

    @classmethod
    def merge(cls, parts: Sequence[Statistics]) -> Statistics:
        """Return the statistics of the tensor that is cut into these parts."""
        finite = [part for part in parts if part.size > part.not_finite]
        counts = [part.size - part.not_finite for part in finite]
        total = sum(counts)
        return cls(
            sum(part.size for part in parts),
            sum(part.not_finite for part in parts),
            min((part.least for part in finite), default=0.0),
            max((part.most for part in finite), default=0.0),
            sum(part.mean * count for part, count in zip(finite, counts)) / total if total else 0.0,
            math.sqrt(sum(part.norm**2 for part in finite)),
        )


class Sink(Protocol):
    """Take tensors as they are computed.

    Attributes:
        takes_backward: gradients of activations are taken too.
    """

    takes_backward: ClassVar[bool]

    def add(
        self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False,
        kind: str = "Tensor", is_gradient: bool = False,
    ) -> None:  # fmt: skip
        """Take one tensor.

        Args:
            name: unique in the phase on this rank.
            order: position in a pass: the comparison goes from the lowest up.
            cut: the part of the full tensor that this rank has; None where it has all of it.
            everywhere: the data-parallel and context-parallel ranks have the same; otherwise each has different rows.
            kind: class of the module that computed it.
            is_gradient: it is the gradient of the tensor of this name.
        """


@dataclass
class Record:
    """A phase of one iteration on one rank. Use it as a sink, then `write` it.

    Attributes:
        FORMAT: written into every index; a reader refuses another one.
        folder: folder of the dump.
        step, role, phase: iteration (from 0), model and phase.
        axis_ranks: this rank's index on each axis: {"rank": 3, "tp": 1, "dp": 0 ...}.
        sizes: number of ranks of each axis.
        with_tensors: tensors are stored next to their statistics.
        max_bytes: largest size in bytes of the stored tensors; for tensors beyond it only statistics are stored.
    """

    INDEX: ClassVar[str] = "index.json"
    TENSORS: ClassVar[str] = "tensors.safetensors"
    FORMAT: ClassVar[str] = "mindspeed_rl accuracy dump 1"
    takes_backward: ClassVar[bool] = False

    folder: Path
    step: int
    role: str
    phase: str
    axis_ranks: dict[str, int]
    sizes: dict[str, int]
    with_tensors: bool
    max_bytes: int
    _entries: list[dict[str, Any]] = field(default_factory=list, init=False)
    _stored: dict[str, Tensor] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def add(
        self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False,
        kind: str = "Tensor", is_gradient: bool = False,
    ) -> None:  # fmt: skip
        """See `Sink.add`."""
        tensor = tensor.detach()
        stored = self._store(name, tensor)
        self._entries.append(
            {
                "name": name,
                "order": order,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "statistics": asdict(Statistics.compute(tensor)),
                "cut": None if cut is None else asdict(cut),
                "everywhere": everywhere,
                "stored": stored,
            }
        )

    def _store(self, name: str, tensor: Tensor) -> bool:
        """Keep a tensor for the file; return False where tensors are not stored, or no more of them."""
        size = tensor.numel() * tensor.element_size()
        if not self.with_tensors or self._bytes + size > self.max_bytes:
            return False
        self._bytes += size
        # safetensors refuses views that share storage; the model continues with the original
        self._stored[name] = tensor.to("cpu", copy=True).contiguous()
        return True

    def write(self) -> Path:
        """Write the two files and return their folder; the index comes last, so that an index is always complete."""
        folder = self.folder / f"step_{self.step}" / f"{self.role}_{self.phase}" / f"rank_{self.axis_ranks['rank']}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._stored:
            save_file(self._stored, folder / self.TENSORS)
        index = {
            "format": self.FORMAT,
            "step": self.step,
            "role": self.role,
            "phase": self.phase,
            "place": self.axis_ranks,
            "sizes": self.sizes,
            "tensors": self._entries,
        }
        path = folder / self.INDEX
        write_file(path, json.dumps(index, indent=1) + "\n")
        return folder


_WEIGHT = re.compile(r"update_(\d+)\.gradients\.(?:(.*)\.)?([^.]+)")
_PASS = re.compile(r"((?:update_\d+\.)?(?:(?:micro|token)_\d+\.)?)(.*)")


@dataclass
class MsprobeRecord(Record):
    """The same in the form of msprobe (level L0 of mindstudio-probe 26), which `msprobe compare` reads.

    `<role>_<phase>/step<n>/rank<r>/` has `dump.json` (statistics), `construct.json` (the module around each), `stack.json` (the
    calls that led to it) and `dump_tensor_data/*.pt`. A name is `Module.<module>.<class>.forward.<i>`, where i counts the
    micro-batches, or the engine's forward steps; gradients of outputs are `.backward.<i>`, of weights
    `.parameters_grad.<update>`. What is not a module, as a column of the loss, is a Tensor. Inputs are left out: they are
    outputs of the module before.
    """

    takes_backward: ClassVar[bool] = True

    _data: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _passes: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict), init=False)
    _stacks: dict[tuple[str, ...], list[str]] = field(default_factory=lambda: defaultdict(list), init=False)

    def add(
        self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False,
        kind: str = "Tensor", is_gradient: bool = False,
    ) -> None:  # fmt: skip
        """See `Sink.add`."""
        weight = _WEIGHT.fullmatch(name)
        if weight is not None:
            update, module, parameter = weight.groups()
            call = f"Module.{module or 'model'}.Weight.parameters_grad.{update}"
            self._data.setdefault(call, {})[parameter] = [self._describe(f"{call}.{parameter}", tensor)]
            return
        match = _PASS.fullmatch(name)
        assert match is not None  # any name has a pass, which may be empty
        passes = self._passes[match[2]]
        index = passes.setdefault(match[1], len(passes))
        call = f"Module.{_name_module(match[2])}.{kind}.{'backward' if is_gradient else 'forward'}.{index}"
        if is_gradient:
            self._data[call] = {"input": [self._describe(f"{call}.input.0", tensor)], "output": []}
            return
        value = self._describe(f"{call}.output.0", tensor)
        self._data[call] = {"input_args": [], "input_kwargs": {}, "output": [value], "parameters": {}}
        frames = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
        lines = (f"File {frame.filename}, line {frame.lineno}, in {frame.name}, \n {frame.line}" for frame in reversed(frames))
        self._stacks[tuple(lines)].append(call)

    def _describe(self, name: str, tensor: Tensor) -> dict[str, Any]:
        """Return the entry of a tensor in dump.json; what it has no number of is null, as msprobe writes it."""
        values = tensor.detach()
        statistics: dict[str, float | int | bool | None] = dict.fromkeys(("Max", "Min", "Mean", "Norm"))
        if values.numel():
            statistics |= {"Max": values.max().item(), "Min": values.min().item()}
        if values.numel() and values.is_floating_point():
            statistics |= {"Mean": values.double().mean().item(), "Norm": values.double().norm().item()}
        entry = {
            "type": "torch.Tensor",
            "dtype": str(values.dtype),
            "shape": list(values.shape),
            **statistics,
            "requires_grad": tensor.requires_grad,
        }
        if self._store(f"{name}.pt", values):
            entry["data_name"] = f"{name}.pt"
        return entry

    def write(self) -> Path:
        """Write the files and return their folder; dump.json comes last."""
        folder = self.folder / f"{self.role}_{self.phase}" / f"step{self.step}" / f"rank{self.axis_ranks['rank']}"
        tensors = folder / "dump_tensor_data"
        (tensors if self.with_tensors else folder).mkdir(parents=True, exist_ok=True)
        for name, tensor in self._stored.items():
            torch.save(tensor, tensors / name)
        stacks = {index: [calls, list(lines)] for index, (lines, calls) in enumerate(self._stacks.items())}
        header = {
            "task": "tensor" if self.with_tensors else "statistics",
            "level": "L0",
            "framework": "pytorch",
            "dump_data_dir": str(tensors.resolve()) if self.with_tensors else None,
        }
        for name, content in (("stack", stacks), ("construct", self._find_parents()), ("dump", {**header, "data": self._data})):
            write_file(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
        return folder

    def _find_parents(self) -> dict[str, str | None]:
        """Return the call of the module around each call of a module: a layer's around its attention's."""
        calls = {}
        for call in self._data:
            module, _, direction, index = call.rsplit(".", 3)
            if direction != "parameters_grad":
                calls[module, direction, index] = call
        parents: dict[str, str | None] = {}
        for (module, direction, index), call in calls.items():
            parts = module.split(".")
            around = (calls.get((".".join(parts[:end]), direction, index)) for end in range(len(parts) - 1, 0, -1))
            parents[call] = next(filter(None, around), None)
        return parents


def _name_module(name: str) -> str:
    """Return Megatron's name of a module: decoder.layers.3.self_attention for layers.3.attention."""
    layer = re.fullmatch(r"layers\.(\d+)\.(attention|mlp|output)", name)
    if layer is not None:
        return f"decoder.layers.{layer[1]}" + {"attention": ".self_attention", "mlp": ".mlp", "output": ""}[layer[2]]
    return "decoder.final_layernorm" if name == "final_norm" else name


#: by `msprobe_config.dump_format`
RECORDS: dict[str, type[Record]] = {"safetensors": Record, "msprobe": MsprobeRecord}

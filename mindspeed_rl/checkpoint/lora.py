"""LoRA adapters: merged into the base on the way, or exported as a folder that `peft` loads."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.hf import read_safetensors_header
from mindspeed_rl.checkpoint.jobs import LoraShards, add_delta
from mindspeed_rl.checkpoint.mcore import Adapters
from mindspeed_rl.checkpoint.tensor_record import TensorRecord
from mindspeed_rl.config.model_metadata import ADAPTER_CONFIG
from mindspeed_rl.files import read_json
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.vision import TOWER, get_tower_part, is_adapted
from mindspeed_rl.models.weights import TensorSource, WeightOp

_PEFT_PREFIX = "base_model.model."
#: keys of adapter_config.json that are read here
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"})
#: keys that say where an adapter comes from, which modules it has (its tensors say that too), and how it was trained
_OF_ITS_ORIGIN = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules target_parameters task_type".split()
)
#: values of init_lora_weights that leave the base as it is; the others train next to a changed one
_PLAIN_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
#: `...lora_A.weight`, or with the name of the adapter, as some trainers save it
_LORA_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.\w+)?\.weight")


def check_scale(r: int | None, alpha: float | None, adapters: Adapters, stated: tuple[int | None, float | None]) -> float:
    """Compute alpha / r of Megatron adapters.

    Args:
        r, alpha: the user's values; None takes what the checkpoint states.
        stated: (r, alpha) in the checkpoint's args.

    Raises:
        ValueError: r or alpha contradicts the adapter, or alpha is stated nowhere.
    """
    ranks = {shard.shape[0] for _, a, _ in adapters.values() for shard in a}
    if len(ranks) != 1:
        raise ValueError(f"the adapters have different ranks {sorted(ranks)}; one rank for all is supported")
    actual = ranks.pop()
    if r is not None and r != actual:
        raise ValueError(f"--lora-r {r} does not match the adapter, whose rank is {actual}")
    if alpha is not None and stated[1] is not None and alpha != stated[1]:
        raise ValueError(f"--lora-alpha {alpha:g} does not match the checkpoint, which says {stated[1]:g}")
    alpha = alpha if alpha is not None else stated[1]
    if alpha is None:
        raise ValueError("the checkpoint does not state lora_alpha; pass --lora-alpha as it was in training")
    return alpha / actual


def is_peft_folder(path: Path) -> bool:
    """Return whether a folder holds a PEFT adapter."""
    return (path / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class PeftMerge:
    """A transform that adds a PEFT adapter to the HF weights it belongs to, in float32.

    Args:
        path: its folder.
        pairs: HF tensor name -> records of A [r, in] and B [out, r].
        scale: alpha / r (or alpha / sqrt(r) with rank-stabilized LoRA).
    """

    path: Path
    pairs: Mapping[str, tuple[TensorRecord, TensorRecord]]
    scale: float

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.pairs:
            return tensor
        a, b = (record.read() for record in self.pairs[name])
        return add_delta(tensor, a, b, self.scale)

    def fuse(self, op: WeightOp) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return the adapter of one Megatron parameter; None without one.

        Adapters of tensors that Megatron has in one parameter (query, key and value) keep their own rows of A, one after the
        other, and their own columns of B, which changes nothing; where they are equal, as in exports of this project, A is
        there once.

        Returns:
            A [R, in], and for each HF tensor B [rows, R], zero where the tensor has no adapter.
        """
        pairs = {name: self.pairs[name] for name in op.hf if name in self.pairs}
        if not pairs:
            return None
        matrices = [(name, a.read(), b.read()) for name, (a, b) in pairs.items()]
        first = matrices[0][1]
        shares = all(torch.equal(a, first) for _, a, _ in matrices)
        full = first if shares else torch.cat([a for _, a, _ in matrices])
        outputs = {name: torch.zeros(shape[0], len(full)) for name, shape in zip(op.hf, op.shapes)}
        start = 0
        for name, a, b in matrices:
            outputs[name][:, start : start + len(a)] = b
            start += 0 if shares else len(a)
        return full.float(), outputs

    def count_ranks(self, ops: Iterable[WeightOp], parts: Sequence[str]) -> int:
        """Return the rank that Megatron's parameters need to go on training the adapter.

        Args:
            parts: that train adapters, `MegatronConfig.adapted_parts`.

        Raises:
            ValueError: the adapter belongs to other modules too.
        """
        ranks = 0
        for op in ops:
            fused = self.fuse(op)
            if fused is None:
                continue
            if not is_adapted(op.mcore, parts):
                module, advice = op.mcore.removesuffix(".weight").rpartition(".")[2], "add it"
                if op.mcore.startswith(TOWER):
                    module = get_tower_part(op.mcore)
                    advice = f"set {'freeze_vit' if module == 'tower' else 'freeze_aligner'}: false"
                raise ValueError(
                    f"lora_target_modules: {self.path} adapts {op.hf[0]}, which is {module} of Megatron and not among them; "
                    f"{advice}, or leave out lora_target_modules to merge the adapter"
                )
            ranks = max(ranks, len(fused[0]))
        return ranks


@dataclass(frozen=True)
class MergedSource:
    """Tensors of a base model with a PEFT adapter added as they are read."""

    base: TensorSource
    adapter: PeftMerge

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.base.read(name, dim, start, stop)
        if name not in self.adapter.pairs:
            return tensor
        a, b = (record.read() for record in self.adapter.pairs[name])
        if stop is not None:
            a, b = (a, b[start:stop]) if dim == 0 else (a[:, start:stop], b)
        return add_delta(tensor, a, b, self.adapter.scale)


def open_peft(path: Path, ops: Iterable[WeightOp], r: int | None = None, alpha: float | None = None) -> PeftMerge:
    """Open a PEFT LoRA folder for merging, or for training on.

    Args:
        ops: weights of the base.
        r, alpha: the user's values; checked against adapter_config.json.

    Raises:
        ValueError: it is not plain LoRA, r or alpha contradicts it, or it does not fit the base.
    """
    config = _read_config(path)
    for option, given, key in (("--lora-r", r, "r"), ("--lora-alpha", alpha, "lora_alpha")):
        if given is not None and given != config[key]:
            raise ValueError(f"{option} {given:g} does not match {path}, whose {key} is {config[key]:g}")
    rank = config["r"]
    pairs = _pair(path, {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}, rank)
    return PeftMerge(path, pairs, config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _read_config(path: Path) -> dict[str, Any]:
    """Return adapter_config.json as plain LoRA has it."""
    config = read_json(path / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is a {config.get('peft_type')} adapter; only LORA is supported")
    for key in sorted(config.keys() - _READ - _OF_ITS_ORIGIN):
        if config[key]:
            raise ValueError(f"{path}: adapter_config.json sets {key} to {config[key]!r}, which is not supported")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path}: adapter_config.json has bias {config['bias']!r}; supported is 'none'")
    start = config.get("init_lora_weights")
    if str(start).lower() not in _PLAIN_STARTS:
        raise ValueError(
            f"{path}: adapter_config.json has init_lora_weights {start!r}, which changes the base too; convert the adapter to "
            "plain LoRA (peft's save_pretrained with path_initial_model_for_weight_conversion)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    are_numbers = type(rank) is int and isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not are_numbers or rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"{path}: adapter_config.json has r {rank!r} and lora_alpha {alpha!r}; expected numbers above 0")
    return config


def _pair(path: Path, hf_shapes: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[TensorRecord, TensorRecord]]:
    """Return the tensors A and B of an adapter by the HF name of the weight that they are added to."""
    sides: dict[str, dict[str, TensorRecord]] = {}
    for key, record in read_safetensors_header(path / "adapter_model.safetensors").items():
        match = _LORA_NAME.fullmatch(key.removeprefix(_PEFT_PREFIX))
        if match is None:
            raise ValueError(f"{path} holds {key!r}, which is not a LoRA weight (lora_A.weight or lora_B.weight)")
        # PEFT has the names of transformers' modules, which a checkpoint of Qwen2.5-VL has not
        module = match["module"]
        own = re.sub(r"^model\.(visual\.)|^(model\.)language_model\.", r"\1\2", module)
        name = next((f"{one}.weight" for one in (module, own) if f"{one}.weight" in hf_shapes), None)
        if name is None:
            raise ValueError(f"{path} adapts {module}, which the base does not have")
        if match["side"] in sides.setdefault(name, {}):
            raise ValueError(f"{path} holds {key!r} next to another lora_{match['side']} of {module}; one adapter is supported")
        sides[name][match["side"]] = record
    if not sides:
        raise ValueError(f"{path} holds no LoRA weights")
    pairs: dict[str, tuple[TensorRecord, TensorRecord]] = {}
    for name, found in sides.items():
        module = name.removesuffix(".weight")
        for side, other in (("A", "B"), ("B", "A")):
            if side not in found:
                raise ValueError(f"{path}: the lora_{other} of {module} has no lora_{side} next to it")
        a, b = found["A"], found["B"]
        outer, inner = hf_shapes[name]
        if a.shape != (rank, inner) or b.shape != (outer, rank):
            shapes = f"{list(b.shape)} x {list(a.shape)}"
            raise ValueError(f"{path}: the adapter of {module}, {shapes} with r {rank}, does not fit {list(hf_shapes[name])}")
        pairs[name] = (a, b)
    return pairs


def name_matrices(architecture: Architecture, tensor: str) -> tuple[str, str]:
    """Return the names of A and B of an HF tensor in a PEFT folder."""
    module = _PEFT_PREFIX + architecture.get_module_name(tensor).removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def get_staging_path(path: Path) -> Path:
    """Return the folder in which an export is built."""
    return path.with_name(path.name + ".partial")


def export_peft(
    path: Path,
    adapters: Adapters,
    scale: float,
    base_model: str | None,
    architecture: Architecture,
    *,
    others: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> list[str]:
    """Write Megatron adapters as a PEFT folder, under the names of transformers' modules; the last part of these names.

    A fused Megatron parameter (qkv, gate and up) becomes one adapter per HF module: they share A, and each takes its rows of B.

    Args:
        others: A and B of further modules by their names in transformers, of the same rank and scale.

    Raises:
        ValueError: an adapter belongs to several experts at once (grouped GEMM), or the folder exists.
    """
    from safetensors.torch import save_file

    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists already; choose a new folder")
    tensors: dict[str, Tensor] = {}
    rank = 0
    for op, a_shards, b_shards in adapters.values():
        if len(op.experts) > 1:
            raise ValueError(f"{op.mcore}: adapters of grouped experts cannot be exported; merge them instead")
        a, b = LoraShards(a_shards, b_shards, scale).join_shards(op)
        rank = a.shape[0]
        for name, part in op.shards_to_hf([b]).items() if op.splits[0].dim == 0 else [(op.hf[0], b)]:
            name_a, name_b = name_matrices(architecture, name)
            # safetensors refuses tensors that share memory, as query's, key's and value's A do
            tensors[name_a], tensors[name_b] = a.clone(), part.contiguous()
    for module, (a, b) in (others or {}).items():
        rank = a.shape[0]
        tensors[f"{_PEFT_PREFIX}{module}.lora_A.weight"], tensors[f"{_PEFT_PREFIX}{module}.lora_B.weight"] = a, b
    paths = sorted({key.rsplit(".lora_", 1)[0].removeprefix(_PEFT_PREFIX) for key in tensors})
    modules = sorted({path.rpartition(".")[2] for path in paths})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        # peft declares an int; a fraction is written only where there is one
        "lora_alpha": int(scale * rank) if float(scale * rank).is_integer() else scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # other modules can have the same last part of a name where there is a tower
        "target_modules": modules if architecture.read_tower_ops is None else paths,
    }
    partial = get_staging_path(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if path.exists():
        path.rmdir()
    os.replace(partial, path)
    return modules

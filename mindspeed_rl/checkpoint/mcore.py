"""Megatron's per-rank checkpoints: ``iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, mcore and legacy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.jobs import Group, MegatronGroup, MegatronTarget, StoredTensor
from mindspeed_rl.checkpoint.megatron_args import CheckpointArgs, read_args
from mindspeed_rl.checkpoint.newest import TRACKER_NAME, newest_checkpoint
from mindspeed_rl.checkpoint.tensor_record import TensorRecord
from mindspeed_rl.checkpoint.torch_file import create_with_holes, load_with_records, records_at, walk_records
from mindspeed_rl.files import describe_missing
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.layout import Layout, Rank
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.names import (
    fuse_mindspeed_mla,
    get_legacy_keys,
    get_transformer_engine_name,
    list_legacy_keys,
    list_names,
)
from mindspeed_rl.models.vision import TOWER
from mindspeed_rl.models.weights import WeightOp

_RANK_FILE = "model_optim_rng.pt"
# Megatron leaves a number out where its size is 1, so a single second number counts pipeline or expert ranks
_RANK_FOLDER = re.compile(r"^mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")
# no weights: state of 8-bit kernels, and rotary frequencies that every model computes from its config
_IGNORED = re.compile(r"_extra_state$|rotary_pos_emb\.inv_freq$|rotary_emb\.inv_freq$|_float8_state$")

#: LoRA weights of a checkpoint: Megatron name -> its row, A shards, B shards.
Adapters = Mapping[str, tuple[WeightOp, tuple[StoredTensor, ...], tuple[StoredTensor, ...]]]


def iteration_folder(path: str | Path, iteration: int | None = None) -> Path:
    """Find the folder with the rank files: the path itself, or the one that ``latest_checkpointed_iteration.txt`` names.

    Raises:
        ValueError: the path holds no Megatron checkpoint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder" if folder.exists() else describe_missing(folder))
    if iteration is not None:
        named = folder / f"iter_{iteration:07d}"
        if not named.is_dir():
            others = sorted(entry.name for entry in folder.glob("iter_*") if entry.is_dir() and entry.name[5:].isdigit())
            held = f"it has {', '.join(others[-5:])}" if others else "it has no iterations"
            raise ValueError(f"{folder} has no iter_{iteration:07d} (iteration {iteration}); {held}")
        return named
    if any(folder.glob("mp_rank_*")) or (folder / "metadata.json").is_file():
        return folder
    tracker = folder / TRACKER_NAME
    if not tracker.is_file():
        if (newest := newest_checkpoint(folder)) is not None:
            return folder / f"iter_{int(newest):07d}"
        raise ValueError(f"{folder} is not a Megatron checkpoint: it has neither {TRACKER_NAME} nor mp_rank_* folders")
    text = tracker.read_text(encoding="utf-8").strip()
    if text != "release" and not text.isdigit():
        raise ValueError(f"{tracker} says {text!r}; expected an iteration number or 'release'")
    named = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not named.is_dir():
        raise ValueError(f"{tracker} names {named.name}, which is missing")
    return named


def _rank_folder_name(rank: Rank, layout: Layout) -> str:
    """Return ``mp_rank_TT``, with the pipeline rank if PP > 1 and the expert rank if EP > 1."""
    name = f"mp_rank_{rank.tp:02d}"
    if layout.pp > 1:
        name += f"_{rank.pp:03d}"
    if layout.ep > 1:
        name += f"_{rank.ep:03d}"
    return name


def _model_key(vp_stage: int, vpp: int) -> str:
    """Return the key of a model chunk in a rank file."""
    return "model" if vpp == 1 else f"model{vp_stage}"


def list_surplus(model_config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Return the surplus of the names that no weight takes: all, but a tower that `language_model_only` leaves out."""
    return sorted(name for name in names if model_config.vision is not None or not name.startswith(TOWER))


@dataclass(frozen=True)
class _Holders:
    """Places of the shards of a parameter: for every shard, the ranks that hold it and the chunk's (pp_rank, vp_stage)."""

    pp_rank: int
    vp_stage: int
    shards: tuple[tuple[Rank, ...], ...]


def holders(op: WeightOp, layout: Layout) -> _Holders:
    """Return the ranks that hold each shard of a parameter, in shard order."""
    if op.section == "pre":
        pp_rank, vp_stage = layout.first_chunk
    elif op.section == "layer":
        assert op.layer is not None
        pp_rank, vp_stage, _ = layout.find_layer(op.layer)
    else:
        pp_rank, vp_stage = layout.last_chunk
    ranks = [rank for rank in layout.ranks() if rank.pp == pp_rank]
    if op.axis == "etp":
        ranks = [rank for rank in ranks if op.experts[0] in layout.local_experts(rank.tp, rank.ep)]
        count = layout.expert_tp_size
        shard_of: Callable[[Rank], int] = lambda rank: rank.tp % layout.expert_tp_size  # noqa: E731
    else:
        count = layout.tp
        shard_of = lambda rank: rank.tp  # noqa: E731
    shards = tuple(tuple(rank for rank in ranks if shard_of(rank) == index) for index in range(count))
    assert all(shards), f"{op.mcore}: no rank holds some shard"
    return _Holders(pp_rank, vp_stage, shards)


def _stored_ops(ops: Iterable[WeightOp], layout: Layout, model_config: ModelConfig) -> list[WeightOp]:
    """Return the parameters a layout stores: a tied head only where the last chunk is not also the first.

    With prediction layers on another chunk than the embedding, that chunk has a copy of the embedding.
    """
    # stages are compared, not chunks: under dualpipev stage 0 has both ends, so its ranks have the embedding for the head
    has_copy = layout.first_chunk[0] != layout.last_chunk[0]
    kept = [op for op in ops if has_copy or not op.copy_of_tied]
    if model_config.mtp_num_layers and has_copy:
        embedding = next(op for op in kept if op.section == "pre")
        kept.append(replace(embedding, section="post", copy_of_tied=True))
    return kept


# ---------------------------------------------------------------------- reading


class MegatronFolder:
    """A per-rank Megatron checkpoint opened for reading.

    Args:
        path: the checkpoint folder, or its ``iter_*`` folder.
        iteration: which iteration; None for the latest.
        verified: the files have been checked against their checksums already.

    Raises:
        ValueError: files are missing or damaged.
    """

    def __init__(self, path: str | Path, iteration: int | None = None, *, verified: bool = False) -> None:
        self.path = Path(path)
        self.folder = iteration_folder(path, iteration)
        if not verified:
            checksums.verify(self.folder)
        self._content: dict[str, dict[str, Any]] = {}
        folders = sorted(entry.name for entry in self.folder.glob("mp_rank_*") if entry.is_dir())
        if not folders:
            raise ValueError(f"{self.folder} has no mp_rank_* folders")
        unknown = [name for name in folders if not _RANK_FOLDER.match(name)]
        if unknown:
            raise ValueError(f"{self.folder / unknown[0]} is not named mp_rank_TT, mp_rank_TT_PPP, mp_rank_TT_EEE or _PPP_EEE")
        self.rank_folders = folders
        #: whether files that were read so far, or files beside them, hold the state of an optimizer
        self.holds_optimizer = any(self.folder.glob("mp_rank_*/distrib_optim.pt"))
        first = self._load(folders[0])
        self.args: CheckpointArgs = read_args(first.get("args"))
        self.legacy = any("language_model" in value for value in first.values() if isinstance(value, Mapping))

    def _load(self, name: str) -> dict[str, Any]:
        if name not in self._content:
            path = self.folder / name / _RANK_FILE
            if not path.is_file():
                raise ValueError(f"rank file {path} is missing")
            content = load_with_records(path)
            if not isinstance(content, dict):
                raise ValueError(f"{path} holds no dict; expected Megatron's model_optim_rng.pt")
            self.holds_optimizer |= bool(content.get("optimizer"))
            # cached for every rank, so what no conversion reads goes: a file from before torch 1.6 holds all of it in memory
            for heavy in ("optimizer", "opt_param_scheduler", "rng_state"):
                content.pop(heavy, None)
            self._content[name] = content
        return self._content[name]

    def names(self) -> set[str]:
        """Return the names of the tensors in all model chunks, as `state` gives them."""
        stored = set()
        for folder in self.rank_folders:
            for key, chunk in self._load(folder).items():
                if re.fullmatch(r"model\d*", key):
                    joined = ("/".join(keys) for keys, _ in walk_records(chunk))
                    stored.update(name if self.legacy else name.removeprefix("module.") for name in joined)
        return stored

    def layout(self, model_config: ModelConfig) -> Layout:
        """Return how the checkpoint is split: from its args, and from the names of its files where args are silent.

        Raises:
            ValueError: args and file names contradict each other, or a rank file is missing.
        """
        args, num_experts = self.args, model_config.num_moe_experts or 0
        tp, pp, ep = self._count_ranks(args, num_experts)
        # counted: args say it in one way or another or not at all, the keys of the file always do
        chunks = [key for key in self._load(self.rank_folders[0]) if re.fullmatch(r"model\d+", key)]
        layout = Layout(
            num_layers=model_config.num_layers,
            tp=tp,
            pp=pp,
            vpp=len(chunks) or 1,
            num_layer_list=args.num_layer_list if pp > 1 else None,
            noop_layers=args.noop_layers,
            schedule="dualpipev" if args.schedule == "dualpipev" else None,
        )
        if num_experts:
            layout = replace(layout, ep=ep, etp=args.etp, num_experts=num_experts, moe_tp_extend_ep=args.moe_tp_extend_ep)
        expected = {_rank_folder_name(rank, layout) for rank in layout.ranks()}
        sizes = f"TP {tp}, PP {pp}, EP {ep}"
        if missing := expected - set(self.rank_folders):
            raise ValueError(f"{self.folder} lacks {min(missing)} (a checkpoint of {sizes} has {len(expected)} ranks)")
        if surplus := set(self.rank_folders) - expected:
            raise ValueError(f"{self.folder} has {min(surplus)}, which does not belong to {sizes}")
        return layout

    def _count_ranks(self, args: CheckpointArgs, num_experts: int) -> tuple[int, int, int]:
        """Return the TP, PP and EP size: what args say, else as many as the folders of the ranks number."""
        parts = [match.groups() for match in map(_RANK_FOLDER.match, self.rank_folders) if match is not None]
        first, second, third = (len(set(column) - {None}) for column in zip(*parts, strict=True))
        pp, ep = second or 1, third or 1
        if not third and pp > 1 and num_experts and self._second_index_is_expert(args):
            return args.tp or first, 1, args.ep or pp
        return args.tp or first, args.pp or pp, args.ep or ep

    def _second_index_is_expert(self, args: CheckpointArgs) -> bool:
        """Return whether ``mp_rank_TT_NNN`` counts expert ranks: every expert rank holds the embedding, later stages do not."""
        if args.pp is not None or args.ep is not None:
            return (args.pp or 1) == 1 and (args.ep or 1) > 1
        content = self._load(self.rank_folders[-1])
        last = next(value for key, value in content.items() if re.fullmatch(r"model\d*", key))
        return any("word_embeddings" in "/".join(keys) for keys, _ in walk_records(last))

    def state(self, rank: Rank, vp_stage: int, layout: Layout) -> dict[str, StoredTensor]:
        """Return the tensors of one model chunk by name (for the legacy layout: keys joined by '/')."""
        name, key = _rank_folder_name(rank, layout), _model_key(vp_stage, layout.vpp)
        content = self._load(name)
        if key not in content:
            raise ValueError(f"{self.folder / name / _RANK_FILE} has no {key!r}; it has {', '.join(sorted(map(str, content)))}")
        state = {}
        for keys, record in walk_records(content[key]):
            joined = "/".join(keys)
            state[joined if self.legacy else joined.removeprefix("module.")] = record
        return state

    def open(self, architecture: Architecture, model_config: ModelConfig, loosely: bool = False) -> OpenCheckpoint:
        """Match the files with the architecture's weight table.

        Args:
            loosely: tensors that the table does not know are skipped.

        Raises:
            ValueError: a parameter is missing, has the wrong shape, or is not in the table.
        """
        layout = self.layout(model_config)
        states = {
            (rank, vp_stage): self.state(rank, vp_stage, layout) for rank in layout.ranks() for vp_stage in range(layout.vpp)
        }
        first = next(iter(layout.ranks()))
        # the stored rows give the padding that was chosen on saving, so no option has to
        embedding = self._embedding_rows(states[first, layout.first_chunk[1]])
        # not below vocab_size, which ModelConfig refuses: the group that is too small is named with its file instead
        model_config = replace(model_config, padded_vocab_size=max(embedding * layout.tp, model_config.vocab_size))
        model_config = replace(model_config, mtp_num_layers=self._num_prediction_layers(states))
        names = {name for state in states.values() for name in state}
        if not any(name.startswith(TOWER) for name in names):
            model_config = replace(model_config, vision=None)  # of a run with `language_model_only`
        grouped = any(re.search(r"\.experts\.weight[12]$", name) for name in names)
        packing = ExpertPacking("grouped" if grouped else "local", layout.num_expert_groups if grouped else 1)
        ops = architecture.weight_ops(model_config, packing)
        # Megatron's latent attention has no linear_qkv; MindSpeed's packs its down projections into one
        if model_config.multi_latent_attention and any(".self_attention.linear_qkv.weight" in name for name in names):
            ops = fuse_mindspeed_mla(model_config, ops)
        reader = _Reader(self, model_config, layout, states)
        groups = [reader.group(op) for op in _stored_ops(ops, layout, model_config)]
        if not loosely:
            reader.check_all_used()
        return OpenCheckpoint(architecture, model_config, layout, groups, reader.adapters, reader.unused())

    def adapters(self, architecture: Architecture, model_config: ModelConfig, layout: Layout) -> Adapters:
        """Return the LoRA weights of a checkpoint that need not hold the base weights; cut like ``layout``.

        Raises:
            ValueError: it is cut differently, an adapter is incomplete, or it holds none.
        """
        own = self.layout(model_config)
        if (own.tp, own.pp, own.vpp, own.ep) != (layout.tp, layout.pp, layout.vpp, layout.ep):
            raise ValueError(
                f"{self.path} is cut TP {own.tp}, PP {own.pp}, VPP {own.vpp}, EP {own.ep}; the base is cut TP {layout.tp}, "
                f"PP {layout.pp}, VPP {layout.vpp}, EP {layout.ep}: LoRA and base must be cut alike"
            )
        states = {(rank, stage): self.state(rank, stage, own) for rank in own.ranks() for stage in range(own.vpp)}
        reader = _Reader(self, model_config, own, states)
        for op in _stored_ops(architecture.weight_ops(model_config), own, model_config):
            reader.collect_adapter(op, holders(op, own))
        unknown = [name for state in states.values() for name in state if ".lora_" in name]
        unknown = [name for name in unknown if not any(name in names for names in reader.used.values())]
        if unknown:
            raise ValueError(f"{self.path} holds {unknown[0]!r}, which belongs to no parameter of {model_config.architecture}")
        if not reader.adapters:
            raise ValueError(f"{self.path} holds no LoRA weights (names ending in lora_A.default.weight)")
        return reader.adapters

    def _embedding_rows(self, state: Mapping[str, StoredTensor]) -> int:
        for name, record in state.items():
            if name.endswith(("word_embeddings.weight", "word_embeddings/weight")) and len(record.shape) == 2:
                return record.shape[0]
        raise ValueError(f"{self.folder / self.rank_folders[0]} has no word embeddings")

    def _num_prediction_layers(self, states: Mapping[tuple[Rank, int], Mapping[str, StoredTensor]]) -> int:
        numbers = [
            int(match[1]) for state in states.values() for name in state if (match := re.match(r"mtp\.layers\.(\d+)\.", name))
        ]
        return max(numbers, default=-1) + 1


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint matched with its weight table.

    Args:
        groups: its parameters, in HF's terms.
        adapters: LoRA weights found beside them.
        skipped: names of stored tensors that the architecture does not know.
    """

    architecture: Architecture
    model_config: ModelConfig
    layout: Layout
    groups: Sequence[Group]
    adapters: Adapters
    skipped: Sequence[str] = ()


class _Reader:
    """Finds parameters in the states of all ranks and keeps track of what was used."""

    def __init__(
        self,
        folder: MegatronFolder,
        model_config: ModelConfig,
        layout: Layout,
        states: Mapping[tuple[Rank, int], Mapping[str, StoredTensor]],
    ) -> None:
        self.folder, self.model_config, self.layout, self.states = folder, model_config, layout, states
        self.used: dict[tuple[Rank, int], set[str]] = {key: set() for key in states}
        self.adapters: dict[str, tuple[WeightOp, tuple[StoredTensor, ...], tuple[StoredTensor, ...]]] = {}

    def _candidates(self, op: WeightOp) -> list[str]:
        local = self.layout.local_name(op.mcore)
        if self.folder.legacy:
            return ["/".join(keys) for keys in list_legacy_keys(op, local)]
        names = list_names(self.model_config, op, local)
        # an adapted layer's own weight and bias lie under base_layer, as PEFT wraps it
        return [variant for name in names for variant in (name, re.sub(r"\.(weight|bias)$", r".base_layer.\1", name))]

    def _find(self, op: WeightOp, rank: Rank, vp_stage: int) -> tuple[str, StoredTensor]:
        state = self.states[rank, vp_stage]
        names = self._candidates(op)
        for name in names:
            if name in state:
                self.used[rank, vp_stage].add(name)
                return name, state[name]
        where = self.folder.folder / _rank_folder_name(rank, self.layout) / _RANK_FILE
        raise ValueError(
            f"{where} lacks {names[0]!r}, which a {self.model_config.architecture} checkpoint"
            f" with num_hidden_layers {self.model_config.num_layers} has"
        )

    def group(self, op: WeightOp) -> MegatronGroup:
        where = holders(op, self.layout)
        expected = op.shard_shape(len(where.shards))
        shards = []
        for ranks in where.shards:
            copies = []
            for rank in ranks:
                name, record = self._find(op, rank, where.vp_stage)
                if tuple(record.shape) != expected:
                    file = self.folder.folder / _rank_folder_name(rank, self.layout) / _RANK_FILE
                    raise ValueError(f"{file}: {name} has shape {list(record.shape)}; expected {list(expected)}")
                copies.append(record)
            shards.append(tuple(copies))
        self.collect_adapter(op, where)
        return MegatronGroup(op, tuple(shards))

    def collect_adapter(self, op: WeightOp, where: _Holders) -> None:
        """Note the LoRA weights of a parameter, if the checkpoint has any."""
        if self.folder.legacy:
            return
        stems = {name.removesuffix(".weight").removesuffix(".base_layer") for name in self._candidates(op)}
        parts: dict[str, list[StoredTensor]] = {"lora_A": [], "lora_B": []}
        # ranks that repeat a shard repeat its adapter: one copy is taken, and all count as used
        for ranks in where.shards:
            for kind, records in parts.items():
                for name in (f"{stem}.{kind}.default.weight" for stem in stems):
                    if name in self.states[ranks[0], where.vp_stage]:
                        records.append(self.states[ranks[0], where.vp_stage][name])
                        for rank in ranks:
                            self.used[rank, where.vp_stage].add(name)
        count = len(where.shards)
        if parts["lora_A"] or parts["lora_B"]:
            if len(parts["lora_A"]) != count or len(parts["lora_B"]) != count:
                raise ValueError(f"{self.folder.folder}: the adapter of {op.mcore} is incomplete")
            self.adapters[op.mcore] = (op, tuple(parts["lora_A"]), tuple(parts["lora_B"]))

    def unused(self) -> list[str]:
        """Return the names that no parameter is stored under."""
        return sorted({name for key in self.states for name in self._unused(key)})

    def _unused(self, key: tuple[Rank, int]) -> list[str]:
        names = (name for name in self.states[key] if name not in self.used[key] and not _IGNORED.search(name))
        return list_surplus(self.model_config, names)

    def check_all_used(self) -> None:
        for rank, vp_stage in self.states:
            extra = self._unused((rank, vp_stage))
            if extra:
                file = self.folder.folder / _rank_folder_name(rank, self.layout) / _RANK_FILE
                raise ValueError(
                    f"{file} holds {extra[0]!r}"
                    + (f" and {len(extra) - 1} more tensors" if len(extra) > 1 else "")
                    + f" unknown to {self.model_config.architecture} with num_hidden_layers {self.model_config.num_layers}"
                    + "; --load-checkpoint-loosely skips them"
                )


# ---------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _RankFile:
    """One rank file to be made: its place, and the dtype and shape of everything in it."""

    path: Path
    tensors: Mapping[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class RankPlan:
    """The files of a per-rank checkpoint and the places of each parameter in them."""

    files: Sequence[_RankFile]
    places: Sequence[tuple[WeightOp, tuple[tuple[tuple[Path, tuple[str, ...]], ...], ...]]]

    def create(self, args: argparse.Namespace) -> list[MegatronTarget]:
        """Make the files with holes (those that exist are kept) and return what fills them."""
        records: dict[Path, dict[tuple[str, ...], TensorRecord]] = {}
        for file in self.files:
            if file.path.is_file():
                records[file.path] = records_at(file.path, file.tensors)
                continue
            file.path.parent.mkdir(parents=True, exist_ok=True)
            # 3.0 as upstream writes: below 2 Megatron would reorder query, key and value on loading
            content = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
            records[file.path] = create_with_holes(file.path, content, file.tensors)
        return [
            MegatronTarget(op, tuple(tuple(records[path][keys] for path, keys in copies) for copies in shards))
            for op, shards in self.places
        ]


def plan_ranks(
    folder: Path,
    ops: Sequence[WeightOp],
    model_config: ModelConfig,
    layout: Layout,
    dtype_of: Callable[[WeightOp], torch.dtype],
    *,
    legacy: bool = False,
    transformer_engine: bool = False,
) -> RankPlan:
    """Plan the rank files of a checkpoint in ``folder``, which is not touched.

    Raises:
        ValueError: a parameter cannot be divided, or the legacy layout has no place for it.
    """
    for op in ops:  # before there is a file for every rank: far too many ranks are one error as well
        op.check_divisible(layout.expert_tp_size if op.axis == "etp" else layout.tp)
    tensors: dict[Path, dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]] = {
        folder / _rank_folder_name(rank, layout) / _RANK_FILE: {} for rank in layout.ranks()
    }
    places = []
    for op in _stored_ops(ops, layout, model_config):
        where = holders(op, layout)
        local = layout.local_name(op.mcore)
        if legacy:
            inner = get_legacy_keys(op, local)
        else:
            inner = (get_transformer_engine_name(model_config, op, local) if transformer_engine else local,)
        keys = (_model_key(where.vp_stage, layout.vpp), *inner)
        shape, dtype = op.shard_shape(len(where.shards)), dtype_of(op)
        shards = []
        for ranks in where.shards:
            copies = []
            for rank in ranks:
                path = folder / _rank_folder_name(rank, layout) / _RANK_FILE
                tensors[path][keys] = (dtype, shape)
                copies.append((path, keys))
            shards.append(tuple(copies))
        places.append((op, tuple(shards)))
    return RankPlan([_RankFile(path, content) for path, content in tensors.items()], places)

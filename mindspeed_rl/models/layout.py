"""Layers and experts of each rank, and the map between its local parameter names and global ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

_LAYER = re.compile(r"^((?:module\.)*decoder\.layers\.)(\d+)(\..+)$")
_LOCAL_EXPERT = re.compile(r"^(.*\.experts\.local_experts\.)(\d+)(\..+)$")
_TE_EXPERT = re.compile(r"^(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_GROUPED = re.compile(r"^(.*\.experts\.weight[12])(?:\[(\d+):(\d+)\])?$")


@dataclass(frozen=True)
class Rank:
    """Coordinates of one rank file: tensor, pipeline and expert rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Layout:
    """Division of a model over tensor, pipeline and expert ranks.

    Args:
        num_layers: real decoder layers (from config.json), without no-op layers.
        tp, pp, ep: tensor, pipeline and expert parallel sizes.
        vpp: model chunks per pipeline stage (virtual pipeline); 1 means none.
        etp: tensor parallel size inside an expert; None means the same as ``tp``.
        num_layer_list: layers per pipeline stage ("DPP"); excludes ``vpp`` > 1 and ``noop_layers``.
        noop_layers: positions of empty layers in the lengthened list of layers (real + empty), counted from 0.
        num_experts: experts per MoE layer, 0 for a dense model.
        moe_tp_extend_ep: experts are divided over EP x TP ranks and not split inside.
        schedule: "dualpipev" gives stage p the p-th block from the front and the p-th from the back.

    Raises:
        ValueError: a size does not divide what it has to divide, or two options exclude each other.
    """

    num_layers: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    num_layer_list: tuple[int, ...] | None = None
    noop_layers: tuple[int, ...] = ()
    num_experts: int = 0
    moe_tp_extend_ep: bool = False
    schedule: Literal["dualpipev"] | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "tp", "pp", "vpp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self._check_pipeline()
        self._check_experts()

    def _check_pipeline(self) -> None:
        if self.num_layer_list is not None:
            if len(self.num_layer_list) != self.pp:
                raise ValueError(
                    f"num_layer_list {list(self.num_layer_list)} has {len(self.num_layer_list)} entries; "
                    f"it needs one per pipeline stage ({self.pp})"
                )
            if sum(self.num_layer_list) != self.num_layers:
                raise ValueError(
                    f"num_layer_list {list(self.num_layer_list)} adds up to {sum(self.num_layer_list)} layers; "
                    f"the model has {self.num_layers}"
                )
            if min(self.num_layer_list) < 1:
                raise ValueError(f"num_layer_list {list(self.num_layer_list)} gives a stage no layer; every stage needs one")
            if self.vpp > 1 or self.schedule:
                raise ValueError("num_layer_list cannot be combined with virtual pipeline stages; drop one of them")
            if self.noop_layers:
                raise ValueError("num_layer_list cannot be combined with noop_layers; drop one of them")
            return
        if len(set(self.noop_layers)) != len(self.noop_layers) or any(
            not 0 <= layer < self.num_slots for layer in self.noop_layers
        ):
            raise ValueError(
                f"noop_layers {list(self.noop_layers)} must be distinct positions from 0 to {self.num_slots - 1} "
                f"({self.num_layers} real + {len(self.noop_layers)} empty layers)"
            )
        if self.num_slots % self.pp:
            raise ValueError(
                f"{self.num_slots} layers cannot be divided over pipeline size {self.pp}; "
                "choose a divisor, or use num_layer_list or noop_layers"
            )
        if self.schedule == "dualpipev" and self.vpp != 2:
            raise ValueError(f"dualpipev has 2 model chunks a stage; got {self.vpp}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"{self.vpp} virtual pipeline stages need a pipeline size above 1")
        if self.num_slots // self.pp % self.vpp:
            raise ValueError(
                f"{self.num_slots // self.pp} layers per pipeline stage cannot be divided over {self.vpp} virtual stages"
            )

    def _check_experts(self) -> None:
        if not self.num_experts:
            if self.ep > 1:
                raise ValueError(f"expert parallel size {self.ep} needs a model with experts; this one is dense")
            return
        if self.moe_tp_extend_ep and self.etp not in (None, 1):
            raise ValueError(f"moe_tp_extend_ep does not split experts; expert tensor parallel size {self.etp} contradicts it")
        if self.tp % self.expert_tp_size:
            raise ValueError(f"expert tensor parallel size {self.etp} must divide the tensor parallel size {self.tp}")
        if self.num_experts % self.num_expert_groups:
            raise ValueError(f"{self.num_experts} experts cannot be divided over {self.num_expert_groups} expert ranks")

    # ------------------------------------------------------------------ pipeline

    @property
    def num_slots(self) -> int:
        """Real and empty layers; Megatron's ``num_layers`` when there are no-op layers."""
        return self.num_layers + len(self.noop_layers)

    def chunk_layers(self, pp_rank: int, vp_stage: int = 0) -> list[int | None]:
        """Return the global indices of the layers in a model chunk, at their local index; None marks an empty layer."""
        if self.num_layer_list is not None:
            start = sum(self.num_layer_list[:pp_rank])
            return list(range(start, start + self.num_layer_list[pp_rank]))
        size = self.num_slots // self.pp // self.vpp
        if self.schedule == "dualpipev":
            block = pp_rank if vp_stage == 0 else 2 * self.pp - 1 - pp_rank
        else:
            block = vp_stage * self.pp + pp_rank
        return self.list_slots()[block * size : (block + 1) * size]

    def list_slots(self) -> list[int | None]:
        """Return the global index of the real layer in each slot of the lengthened list; None for an empty one."""
        layers: list[int | None] = []
        for slot in range(self.num_slots):
            layers.append(None if slot in self.noop_layers else slot - sum(noop < slot for noop in self.noop_layers))
        return layers

    def find_layer(self, layer: int) -> tuple[int, int, int]:
        """Return (pp_rank, vp_stage, local index) of a real layer."""
        for pp_rank in range(self.pp):
            for vp_stage in range(self.vpp):
                layers = self.chunk_layers(pp_rank, vp_stage)
                if layer in layers:
                    return pp_rank, vp_stage, layers.index(layer)
        raise ValueError(f"layer {layer} does not exist; the model has layers 0 to {self.num_layers - 1}")

    #: (pp_rank, vp_stage) of the embedding
    first_chunk: ClassVar[tuple[int, int]] = (0, 0)

    @property
    def last_chunk(self) -> tuple[int, int]:
        """(pp_rank, vp_stage) of the final norm and the head."""
        return (0, 1) if self.schedule == "dualpipev" else (self.pp - 1, self.vpp - 1)

    # ------------------------------------------------------------------ experts

    @property
    def expert_tp_size(self) -> int:
        """Ranks over which one expert's FFN is split."""
        return 1 if self.moe_tp_extend_ep else self.tp if self.etp is None else self.etp

    @property
    def num_expert_groups(self) -> int:
        """Groups into which the experts of a layer are divided."""
        return self.ep * self.tp if self.moe_tp_extend_ep else self.ep

    @property
    def experts_per_group(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_expert_groups

    def expert_group(self, tp_rank: int, ep_rank: int) -> int:
        """Return the index of the group of experts that a rank has."""
        return ep_rank * self.tp + tp_rank if self.moe_tp_extend_ep else ep_rank

    def local_experts(self, tp_rank: int, ep_rank: int) -> range:
        """Return the global indices of the experts of a rank."""
        start = self.expert_group(tp_rank, ep_rank) * self.experts_per_group
        return range(start, start + self.experts_per_group)

    # ------------------------------------------------------------------ ranks and names

    def ranks(self) -> Iterator[Rank]:
        """Yield every rank that has its own checkpoint file, pipeline stage by pipeline stage.

        With ``etp`` below ``tp`` expert ranks span tensor ranks, so only some (tp, ep) pairs exist.
        """
        # with moe_tp_extend_ep unsplit experts go to EP x TP groups, so that every (tp, ep) pair has a file
        etp = self.expert_tp_size if not self.moe_tp_extend_ep else self.tp
        # both numbers repeat with this period, so one period has every pair that exists
        pairs = sorted({(rank % self.tp, rank // etp % self.ep) for rank in range(math.lcm(self.tp, etp * self.ep))})
        for pp_rank in range(self.pp):
            for tp_rank, ep_rank in pairs:
                yield Rank(tp_rank, pp_rank, ep_rank)

    def global_name(self, local_name: str, pp_rank: int = 0, vp_stage: int = 0, tp_rank: int = 0, ep_rank: int = 0) -> str:
        """Return the global name of a parameter that a rank's module calls ``local_name``.

        ``decoder.layers.<local>`` becomes ``decoder.layers.<global>``, local expert indices become global ones, and a
        grouped-GEMM weight is distinguished by its experts: ``experts.weight1[4:8]``. A leading ``module.`` is dropped.

        Raises:
            ValueError: the rank has no such layer.
        """
        name = re.sub(r"^(module\.)+", "", local_name)
        if match := _LAYER.match(name):
            layers = self.chunk_layers(pp_rank, vp_stage)
            index = int(match[2])
            if index >= len(layers) or layers[index] is None:
                raise ValueError(f"{local_name}: pipeline stage {pp_rank}, chunk {vp_stage} has no layer {index}")
            name = f"{match[1]}{layers[index]}{match[3]}"
        if not self.num_experts or ".shared_experts." in name:
            return name
        experts = self.local_experts(tp_rank, ep_rank)
        if match := _LOCAL_EXPERT.match(name):
            return f"{match[1]}{experts[int(match[2])]}{match[3]}"
        if match := _TE_EXPERT.match(name):
            return f"{match[1]}{experts[int(match[2])]}"
        if match := _GROUPED.match(name):
            return f"{match[1]}[{experts.start}:{experts.stop}]"
        return name

    def local_name(self, global_name: str) -> str:
        """Return a parameter's name on the rank that has it; the inverse of :meth:`global_name`."""
        name = global_name
        if match := _LAYER.match(name):
            name = f"{match[1]}{self.find_layer(int(match[2]))[2]}{match[3]}"
        if not self.num_experts:
            return name
        if match := _LOCAL_EXPERT.match(name):
            return f"{match[1]}{int(match[2]) % self.experts_per_group}{match[3]}"
        if match := _TE_EXPERT.match(name):
            return f"{match[1]}{int(match[2]) % self.experts_per_group}"
        if match := _GROUPED.match(name):
            return match[1]
        return name


def parse_ints(value: str | int | list[int] | None) -> tuple[int, ...]:
    """Return the numbers of a key that has one of the forms "5,95", 5 and [5, 95]; none where it is unset."""
    if value is None or value == "":
        return ()
    items = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    return tuple(int(item) for item in items)

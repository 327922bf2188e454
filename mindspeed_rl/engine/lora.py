"""Low-rank adapters beside Megatron's linear layers, cut over ranks as the layer they adapt.

W x becomes W x + (alpha / r) B A x (LoRA, arXiv:2106.09685). The layers keep their parameter names; an adapter adds
`<layer>.lora_A.default.weight` [r, in] and `<layer>.lora_B.default.weight` [out, r] beside `<layer>.weight`:

- linear_qkv and linear_fc1 (column parallel): B is cut along dim 0, A replicated. The gradients of A x are summed over the
  tensor-parallel ranks; with sequence parallelism A x is gathered.
- linear_proj and linear_fc2 (row parallel): A is cut along dim 1, B replicated. The partial sums A x are reduced, or
  reduce-scattered with sequence parallelism.
- the same layers of an expert: cut alike over the expert tensor ranks; the token dispatcher moves activations, so only the
  gradient of the replicated matrix is summed.

So ranks exchange r numbers a token, never a whole hidden state more than the base layer does.
Grouped experts (one product for all experts of a rank) hold the same matrices stacked: [experts, r, in] and [experts, out, r].
A starts from a generator that is seeded by the run's seed and the layer's name, so it is the same under every layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from mindspeed_rl.checkpoint.lora import export_peft
from mindspeed_rl.engine.lora_layers import (
    AdaptedColumnParallelLinear,
    AdaptedModule,
    AdaptedRowParallelLinear,
    Adapter,
    LoraSettings,
)
from mindspeed_rl.models import specs
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.weights import WeightOp

if TYPE_CHECKING:  # build.py imports this module
    from mindspeed_rl.engine.build import BuiltModel

#: grouped experts -> their adapted form, in releases that have them
_ADAPTED_EXPERTS: dict[type | None, type] = {}
if specs.GROUPED_EXPERTS is not None:
    from mindspeed_rl.engine.lora_experts import AdaptedGroupedMLP

    _ADAPTED_EXPERTS[specs.GROUPED_EXPERTS] = AdaptedGroupedMLP

# ---------------------------------------------------------------------- building

_ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnParallelLinear,
    RowParallelLinear: AdaptedRowParallelLinear,
}


def adapt_spec(spec: TransformerBlockSubmodules, settings: LoraSettings, *, gated: bool) -> None:
    """Replaces the targeted layers in a block's spec by their adapted forms.

    Args:
        gated: linear_fc1 holds gate and up, one above the other.

    Raises:
        ValueError: a target is built from a class that has no adapted form.
    """
    specs.substitute_layers(spec, partial(_adapted, settings=settings, gated=gated))


def _adapted(name: str, part: Any, *, settings: LoraSettings, gated: bool) -> Any:
    module = specs.get_class(part)
    if module in _ADAPTED_EXPERTS and {"linear_fc1", "linear_fc2"} & set(settings.targets):
        return specs.add_arguments(specs.replace_class(part, _ADAPTED_EXPERTS[module]), lora=settings)
    if name not in settings.targets or not isinstance(part, type):
        return part
    if part not in _ADAPTED:
        raise ValueError(f"lora_target_modules: {name} is a {part.__name__} here, which has no adapted form.")
    return specs.add_arguments(_ADAPTED[part], lora=settings, gated=gated and name == "linear_fc1")


def start_adapters(models: list[GPTModel], layout: Layout, *, seed: int) -> None:
    """Freezes everything but adapters (and a value head), gives A its first values and sets B to zero.

    A is uniform in +-1 / sqrt(in), the same under every layout: the whole matrix is drawn and this rank's part taken.
    """
    for stage, model in enumerate(models):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))
        for adapter in _module_adapters(model):
            _draw(adapter, f"{seed}/{_global_name(layout, adapter.weight, stage)}")
        if model.pre_process:
            # Recomputation and pipelines need an input that asks for a gradient, and the frozen embedding gives none.
            model.embedding.register_forward_hook(_ask_for_gradient)


def is_trained(name: str) -> bool:
    """True for the parameters that a LoRA run trains and `lora_ckpt_filter` saves."""
    return ".lora_" in name or name.startswith("rm_head.") or ".rm_head." in name


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _draw(adapter: Adapter, name: str) -> None:
    # not `hash`, which Python salts anew in every process
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    rank_inputs = adapter.a.size(1)
    inputs = rank_inputs * adapter.group.size() if adapter.cuts_input else rank_inputs
    bound = 1.0 / math.sqrt(inputs)
    whole = torch.empty(adapter.a.size(0), inputs).uniform_(-bound, bound, generator=generator)
    first = rank_inputs * adapter.group.rank() if adapter.cuts_input else 0
    adapter.a.copy_(whole[:, first : first + rank_inputs])
    adapter.b.zero_()


def _module_adapters(model: nn.Module) -> Iterator[Adapter]:
    for name, module in model.named_modules():
        if isinstance(module, AdaptedModule):
            yield from module.adapters(f"{name}.")


def _global_name(layout: Layout, local: str, stage: int) -> str:
    ep_rank = parallel_state.get_expert_model_parallel_rank() if layout.num_experts else 0
    return layout.global_name(
        local,
        parallel_state.get_pipeline_model_parallel_rank(),
        stage,
        parallel_state.get_tensor_model_parallel_rank(),
        ep_rank,
    )


# ---------------------------------------------------------------------- using


@contextlib.contextmanager
def adapters_disabled(model: BuiltModel) -> Iterator[None]:
    """Switches the adapters off inside the block, so that the model computes with its base weights alone."""
    adapted = [module for chunk in model.models for module in chunk.modules() if isinstance(module, AdaptedModule)]
    for module in adapted:
        module.adapter_enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapter_enabled = True


def merged_weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Name of each adapted parameter of a bare model -> what computes it with its adapter merged."""
    return {
        f"{name}.{weight}": partial(module.merged, weight)
        for name, module in model.named_modules()
        if isinstance(module, AdaptedModule)
        for weight in module.adapted_weights
    }


def _single_ops(model: BuiltModel) -> dict[str, WeightOp]:
    """Every weight by its Megatron name, each expert's its own."""
    return {op.mcore: op for op in model.plan.architecture.weight_ops(model.plan.model_config, ExpertPacking("local", 1))}


def owned_adapters(model: BuiltModel) -> Iterator[tuple[WeightOp, Adapter]]:
    """This rank's adapters, and the weights that they adapt. Replicas hold equal ones: the first of them owns them."""
    ops = _single_ops(model)
    for stage, chunk in enumerate(model.models):
        for adapter in _module_adapters(chunk):
            op = ops[_global_name(model.plan.layout, adapter.weight, stage)]
            owner = (
                parallel_state.get_expert_data_parallel_rank() == 0
                if op.axis == "etp"
                else parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
            )
            if owner:
                yield op, adapter


def save_peft(model: BuiltModel, settings: LoraSettings, folder: str | Path, base_model: str) -> None:
    """Writes the adapters alone as a folder that `peft` loads; collective over the training world.

    A layer at a time is gathered, so that no rank but the writer holds more than one layer of other ranks.

    Raises:
        ValueError: the folder exists and is not empty.
    """
    plan = model.plan
    ops = _single_ops(model)
    mine: dict[int, list[tuple[str, int, Tensor, Tensor]]] = {}
    for op, adapter in owned_adapters(model):
        assert op.layer is not None  # only layers have adapters
        mine.setdefault(op.layer, []).append((op.mcore, adapter.group.rank(), adapter.a.cpu(), adapter.b.cpu()))
    gathered: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for layer in range(plan.model_config.num_layers):
        everyone: list[Any] = [None] * dist.get_world_size()
        # every rank takes part for every layer, also for those of other stages
        dist.all_gather_object(everyone, mine.get(layer, []))
        if dist.get_rank() == 0:
            for name, shard, a, b in (item for part in everyone for item in part):
                gathered.setdefault(name, {})[shard] = (a, b)
    if dist.get_rank() == 0:
        adapters = {
            name: (
                ops[name],
                tuple(a for _, (a, _) in sorted(shards.items())),
                tuple(b for _, (_, b) in sorted(shards.items())),
            )
            for name, shards in gathered.items()
        }
        export_peft(Path(folder), adapters, settings.scale, base_model)
    # the folder is complete when any rank returns
    dist.barrier()

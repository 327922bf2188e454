"""Balance of the experts in transformers' modules: the losses of routers, and the bias that moves, as on Megatron's engine.

The formulas are those of `engine/router_losses.py`. A router of transformers returns logits, weights of the chosen experts and
chosen experts; its losses are attached to the weights, and the engine divides their gradient by the count with all others. In
earlier releases, such as the 5.10 of the NPU line, some (Ernie 4.5) return the last two the other way round, and some
(DeepSeek-V3, GLM) only logits: these have the losses on the logits, and the chosen experts are what the layer passes on.
DeepSeek-V2 has no router of its own there, and is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.router_losses import RoutedTokens, compute_ratio, compute_router_loss, find_tokens

#: end of Megatron's names of a router's weight and of its bias
_WEIGHT, _BIAS = ".router.weight", ".router.expert_bias"
#: method by which layers choose experts where their routers return only logits
_CHOOSE = "route_tokens_to_experts"


class _AttachedLoss(torch.autograd.Function):
    """Identity of a tensor that adds a loss to the objective."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]  (as above)
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class ExpertBalance:
    """The balance of the experts of one model in training."""

    def __init__(self, config: MegatronConfig, model: ShardedModel) -> None:
        """Attach the losses to the routers.

        Args:
            config: keys of the role.
            model: the model on this rank.
        """
        self._model, self._balancing = model, model.plan.balancing
        shape = model.plan.model_config
        self._experts, self._topk = shape.num_moe_experts or 0, shape.moe_router_topk
        self._score_function = "softmax" if shape.moe_router_biased_softmax else shape.moe_router_score_function
        # adapters leave the routers as they are
        self._rate = 0.0 if model.adapters is not None else config.moe_router_bias_update_rate
        self._group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        ops = model.plan.architecture.weight_ops(shape)
        self._biases = {op.layer: op.hf[0] for op in ops if op.mcore.endswith(_BIAS)} if self._rate else {}
        self._counts = {layer: torch.zeros(self._experts, device=self._device) for layer in self._biases}
        self._ratio = torch.zeros(2)
        #: of the micro-batch that is computed, and the layers that have counted its tokens
        self._tokens: RoutedTokens | None = None
        self._rows = 0
        self._counted: set[int | None] = set()
        for layer, parameter in _list_weights(model).items():
            router, block = _find_router(model, parameter)
            if hasattr(router, "experts"):  # its output is the layer's, and no logits
                raise ValueError(
                    f"engine: fsdp: {type(router).__name__} of transformers {transformers.__version__} has no router whose "
                    "experts could be balanced; install a later release, set engine: megatron, or set moe_aux_loss_coeff: 0 "
                    "and moe_z_loss_coeff: 0."
                )
            router.register_forward_hook(functools.partial(self._balance, layer))
            if layer in self._counts:
                _find_experts(block).register_forward_pre_hook(functools.partial(self._read_chosen, layer))

    @classmethod
    def build(cls, config: MegatronConfig, model: ShardedModel) -> ExpertBalance | None:
        """Build it for a model that trains with a loss of routers or a bias that moves; None for others."""
        balancing, shape = model.plan.balancing, model.plan.model_config
        moves = shape.moe_router_enable_expert_bias and config.moe_router_bias_update_rate > 0.0
        return cls(config, model) if balancing.coeff or balancing.z_coeff or moves else None

    @property
    def _device(self) -> torch.device:
        return next(iter(self._model.names.values())).device

    def start_step(self, micro_batches: Sequence[MicroBatch], count: Callable[[], Tensor]) -> None:
        """Find the weight of a token, or a sequence, in this optimizer step; collective over the data-parallel ranks."""
        self._ratio = compute_ratio(micro_batches, count())

    def arm(self, micro_batch: MicroBatch) -> None:
        """Prepare the next forward pass, its recomputation included, over the micro-batch."""
        choices = self._experts / self._topk
        self._tokens = find_tokens(micro_batch, self._balancing, choices, self._ratio, sequence_parallel=False)
        self._rows = micro_batch.input_ids.size(0)
        self._counted.clear()

    def reset(self) -> None:
        """Clear the routers after all passes, completed or failed."""
        self._tokens = None
        for counts in self._counts.values():
            counts.zero_()

    @torch.no_grad()
    def move_biases(self) -> None:
        """Raise the biases of experts with few tokens in the step, and lower the others; collective over the training world.

        b_i += rate sign(mean_j c_j - c_i), c_i the tokens of expert i: arXiv:2408.15664.
        """
        for layer, name in self._biases.items():
            counts = self._counts[layer]
            dist.all_reduce(counts)
            moved = self._rate * torch.sign(counts.mean() - counts)
            rows, _ = self._model.read_rows(name)
            if rows.numel():  # where it is sharded, one rank has all of it
                rows.add_(moved.to(rows.dtype).view_as(rows))

    def _balance(
        self, layer: int | None, router: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Return the output of a router with its losses attached."""
        tokens = self._tokens
        if tokens is None:
            return None
        parts = list(output) if isinstance(output, tuple) else [output]
        self._read_chosen(layer, router, parts)
        if not (self._balancing.coeff or self._balancing.z_coeff):
            return None
        flat = order_by_position(parts[0], self._rows)
        if tokens.positions is not None:
            flat = flat.index_select(0, tokens.positions)
        loss = compute_router_loss(
            flat, tokens, self._balancing, score_function=self._score_function, topk=self._topk, group=self._group
        )
        target = max(index for index, part in enumerate(parts) if part.is_floating_point())
        parts[target] = cast(Tensor, _AttachedLoss.apply(parts[target], loss))
        return tuple(parts) if isinstance(output, tuple) else parts[0]

    def _read_chosen(self, layer: int | None, module: nn.Module, values: Sequence[object]) -> None:
        """Count the chosen experts among the outputs of a router or the inputs of its experts, once in a pass."""
        tokens = self._tokens
        chosen = next((value for value in values if isinstance(value, Tensor) and not value.is_floating_point()), None)
        if tokens is not None and chosen is not None and layer in self._counts and layer not in self._counted:
            self._counted.add(layer)
            self._count(layer, order_by_position(chosen, self._rows), tokens)

    @torch.no_grad()
    def _count(self, layer: int | None, chosen: Tensor, tokens: RoutedTokens) -> None:
        if tokens.positions is not None:
            chosen = chosen.index_select(0, tokens.positions)
        self._counts[layer] += torch.bincount(chosen.flatten(), minlength=self._experts)


def order_by_position(values: Tensor, rows: int) -> Tensor:
    """Return [tokens, n] in the order of hidden states, position by position, from row by row."""
    return values.reshape(rows, -1, values.size(-1)).transpose(0, 1).reshape(-1, values.size(-1))


def order_by_row(values: Tensor, rows: int) -> Tensor:
    """Return [tokens, n] row by row, as routers of transformers have them, from the order of hidden states."""
    return order_by_position(values, len(values) // rows)


def find_choices(model: ShardedModel) -> dict[int | None, tuple[nn.Module, str]]:
    """Return what chooses the experts of each layer, in order: a module and the name of its method."""
    return {layer: _find_choice(*_find_router(model, parameter)) for layer, parameter in _list_weights(model).items()}


def _find_choice(router: nn.Module, block: nn.Module) -> tuple[nn.Module, str]:
    for module in (router, block):
        if hasattr(module, _CHOOSE):
            return module, _CHOOSE
    return router, "forward"


def _list_weights(model: ShardedModel) -> dict[int | None, str]:
    """Return the parameters of the routers' weights by layer, in order."""
    ops = model.plan.architecture.weight_ops(model.plan.model_config)
    return {op.layer: model.places[op.hf[0]].parameter for op in ops if op.mcore.endswith(_WEIGHT)}


def _find_router(model: ShardedModel, parameter: str) -> tuple[nn.Module, nn.Module]:
    """Return the module that chooses experts by a weight, which may be in a linear layer in it, and the module around it."""
    name = parameter.removesuffix(".weight")
    module = model.module.model.get_submodule(name)
    router = re.sub(r"\.\w+$", "", name) if isinstance(module, nn.Linear) else name
    return model.module.model.get_submodule(router), model.module.model.get_submodule(re.sub(r"\.\w+$", "", router))


def _find_experts(block: nn.Module) -> nn.Module:
    """Return the experts of a layer.

    Raises:
        ValueError: the class has them elsewhere.
    """
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        raise ValueError(
            f"engine: fsdp: {type(block).__name__} has no module experts, whose inputs the moving bias of its router needs; "
            "set moe_router_bias_update_rate: 0, or engine: megatron."
        )
    return experts

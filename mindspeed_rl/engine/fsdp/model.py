"""A module of transformers as the engine computes it: head in chunks, layers sharded by FSDP2, weights by HF name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.fsdp.attention import PACKED_ATTENTION, register
from mindspeed_rl.engine.head_outputs import HeadOutputs, HeadPass
from mindspeed_rl.engine.policy_model import align_values
from mindspeed_rl.engine.vocab import VocabHead
from mindspeed_rl.files import read_json
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource


@dataclass(frozen=True)
class Request:
    """A pass of a micro-batch.

    Attributes:
        temperature: logits are divided by it.
        chunk_size, vocab_chunk_size: see `VocabHead`.
        outputs: results of the head.
    """

    micro_batch: MicroBatch
    temperature: float
    chunk_size: int
    vocab_chunk_size: int | None
    outputs: HeadOutputs


class PolicyModule(nn.Module):
    """A causal language model that returns results of the predicted tokens instead of logits.

    The head's weight is a parameter of the module that FSDP wraps, so it is there in full while this runs, and the chunks of
    `engine/vocab.py` read it; transformers' own forward would make the logits of all tokens.

    Attributes:
        vocab_size: tokens that have a probability.
    """

    def __init__(self, model: PreTrainedModel, plan: ModelPlan, *, in_float32: bool) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = plan.model_config.vocab_size
        self._softcap, self._in_float32 = plan.model_config.final_logit_softcapping, in_float32

    def forward(self, request: Request) -> tuple[Tensor, ...]:
        """Compute the results of a micro-batch, [rows, width] float32 each, 0 on padding."""
        micro_batch = request.micro_batch
        weight = cast(nn.Linear, self.model.get_output_embeddings()).weight
        head = HeadPass(
            micro_batch,
            weight,
            VocabHead(
                request.temperature,
                request.chunk_size,
                padding=max(weight.size(0) - self.vocab_size, 0),
                softcap=self._softcap,
                in_float32=self._in_float32,
                vocab_chunk_size=request.vocab_chunk_size,
            ),
            select=_select,
            align=lambda values: align_values(values, micro_batch, None),
            position_ids=micro_batch.position_ids,
            inputs={},
        )
        results = request.outputs.compute(head, _select(compute_hidden(self.model, micro_batch), micro_batch.hidden_index))
        # FSDP's hook at the start of the backward pass would be lost by an in-place change of a view
        return tuple(result.clone() for result in results)


class ValueModule(nn.Module):
    """A language model with one value before each predicted token, under the name of transformers' sequence classifiers."""

    def __init__(self, model: PreTrainedModel, plan: ModelPlan) -> None:
        super().__init__()
        self.model = model
        model.set_output_embeddings(nn.Identity())
        self.score = nn.Linear(plan.model_config.hidden_size, 1, bias=False)
        self.vocab_size = plan.model_config.vocab_size

    def forward(self, request: Request) -> tuple[Tensor, ...]:
        """Compute the values of a micro-batch, [rows, width] float32, 0 on padding."""
        micro_batch = request.micro_batch
        values = self.score(_select(compute_hidden(self.model, micro_batch), micro_batch.hidden_index))
        return tuple(result.clone() for result in align_values([values[:, 0].float()], micro_batch, None))


_HEADS: dict[str, Callable[[PreTrainedModel, ModelPlan, bool], PolicyModule | ValueModule]] = {
    "lm": lambda model, plan, in_float32: PolicyModule(model, plan, in_float32=in_float32),
    "reward": lambda model, plan, in_float32: ValueModule(model, plan),
}


def compute_hidden(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return [tokens, rows, h]: the hidden states that reach the head."""
    layout: dict[str, Any] = {}
    if micro_batch.packed is not None:
        bounds = micro_batch.packed.cu_seqlens_q_padded
        longest = micro_batch.packed.max_seqlen_q
        layout = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    output = model.base_model(input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False, **layout)
    return output.last_hidden_state.transpose(0, 1)


def _select(hidden_states: Tensor, index: Tensor) -> Tensor:
    return hidden_states.reshape(-1, hidden_states.size(-1)).index_select(0, index)


@dataclass(frozen=True)
class ShardedModel:
    """A model on this rank, of whose parameters it has shards along the first dimension.

    Attributes:
        module: the root, an FSDPModule.
        names: HF name of each parameter, in forward order; a tied head has none of its own.
    """

    plan: ModelPlan
    module: PolicyModule | ValueModule
    names: dict[str, nn.Parameter]

    @property
    def root(self) -> FSDPModule:
        """The root as FSDP's class."""
        return cast(FSDPModule, self.module)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""
        return tuple(self.names[name].shape)

    def read_rows(self, name: str) -> tuple[Tensor, int]:
        """Return this rank's rows of a tensor, which are the parameter's memory, and the index of the first."""
        rows = cast(DTensor, self.names[name].detach()).to_local()
        return rows, first_row(self.names[name].shape[0], dist.get_world_size(), dist.get_rank())

    def read_gradients(self) -> dict[str, Tensor]:
        """Return a copy of the full gradients by HF name; collective."""
        graded = {name: parameter.grad for name, parameter in self.names.items() if parameter.grad is not None}
        return {name: cast(DTensor, grad).full_tensor().clone() for name, grad in graded.items()}

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Fill this rank's rows from HF tensors, reading no other ones.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        for name in self.names:
            rows, start = self.read_rows(name)
            if tuple(source.shape(name)) != self.shape(name):
                raise ValueError(f"{name}: {tuple(source.shape(name))} does not fit the model's {self.shape(name)}.")
            if len(rows):
                rows.copy_(source.read(name, 0, start, start + len(rows)))


def first_row(size: int, num_ranks: int, rank: int) -> int:
    """Return the first row that a rank has of a tensor with so many rows, which FSDP divides as `torch.chunk` does."""
    return min(rank * -(-size // num_ranks), size)


def read_hf_config(hf_folder: Path) -> PretrainedConfig:
    """Return the config of a folder's model.

    Raises:
        ValueError: the installed transformers has no such model of its own; code of the folder is not run.
    """
    try:
        return AutoConfig.from_pretrained(hf_folder, trust_remote_code=False)
    except ValueError as error:
        model_type = read_json(hf_folder / "config.json").get("model_type")
        raise ValueError(
            f"{hf_folder / 'config.json'}: transformers {transformers.__version__} has no model of type {model_type}, which "
            "engine: fsdp computes with; set engine: megatron, or install a release that has it."
        ) from error


def build_sharded_model(config: MegatronConfig, plan: ModelPlan, hf_folder: Path, *, trains: bool) -> ShardedModel:
    """Build a model with empty weights, of which no rank ever has all; collective over the training world.

    Weights that train are float32, and computed with in bfloat16 where the run file has `bf16`; those that do not train are in
    the format that they are computed with.

    Raises:
        ValueError: transformers has no such model, or it has another form than the engine computes.
    """
    hf_config = read_hf_config(hf_folder)
    compute = torch.bfloat16 if config.bf16 else torch.float32
    with torch.device("meta"):
        model = _build_module(hf_config)
        module = _HEADS[plan.model_config.head](model, plan, bool(config.fp32_lm_head)).to(torch.float32 if trains else compute)
    module.requires_grad_(trains)
    device = platform.current().current_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    _shard(module, mesh, MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32))
    module.to_empty(device=device)
    for parameter in module.parameters():
        # or the next call would give it random values; it makes only buffers, such as rotary frequencies
        parameter._is_hf_initialized = True  # pyrefly: ignore[missing-attribute]  (transformers' mark)
    model.initialize_weights()
    if trains and config.recompute_granularity == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return ShardedModel(plan, module, _name_parameters(module, plan))


def _build_module(hf_config: PretrainedConfig) -> PreTrainedModel:
    register()
    for name, value in hf_config.to_dict().items():
        # a sampled token's probability is that of the model as it is
        if isinstance(value, float) and name.endswith(("dropout", "pdrop")):
            setattr(hf_config, name, 0.0)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation=PACKED_ATTENTION)
    # rows have no padding that trains, so that this token is one like all others, as in Megatron
    cast(nn.Embedding, model.get_input_embeddings()).padding_idx = None
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"{type(model).__name__} has a bias in its head, which this engine does not compute.")
    return model


def _shard(module: PolicyModule | ValueModule, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """Shard each decoder layer by itself, and all else with the root."""
    for layer in list_layers(module.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # sums: the step divides once, by the tokens of all ranks; gloo has no other reduction
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def list_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the decoder layers of a model of transformers: the longest of its lists of modules.

    Raises:
        ValueError: it has none.
    """
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers, by which the engine shards.")
    return list(max(lists, key=len))


def _name_parameters(module: PolicyModule | ValueModule, plan: ModelPlan) -> dict[str, nn.Parameter]:
    """Return the parameters by HF name.

    Raises:
        ValueError: they are not the tensors of the family's table of weights.
    """
    found = {
        name.removeprefix("model.") if name.startswith("model.") else name: parameter
        for name, parameter in module.named_parameters()
    }
    expected = {
        name: shape
        for op in plan.architecture.weight_ops(plan.model_config)
        if not op.copy_of_tied
        for name, shape in zip(op.hf, op.shapes)
    }
    differing = {name for name in {*found, *expected} if name not in found or tuple(found[name].shape) != expected.get(name)}
    if differing:
        raise ValueError(
            f"{type(module.model).__name__} of this transformers has other weights than {plan.architecture.name}: "
            f"{min(differing)}; set engine: megatron for the role."
        )
    return {name: found[name] for name in expected}

"""A module of transformers as the engine computes it: head in chunks, layers sharded by FSDP2, weights by HF name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from mindspeed_rl import platform
from mindspeed_rl.adaptors.fsdp_reduction import build_uncopied_reduction
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.fsdp.attention import PACKED_ATTENTION, SequenceSplit, register
from mindspeed_rl.engine.fsdp.images import ImageInputs, choose_trained
from mindspeed_rl.engine.fsdp.lora import AdapterPair, ShardedAdapters, adapt_module, gather_rows
from mindspeed_rl.engine.head_outputs import HeadOutputs, HeadPass
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.policy_model import align_values
from mindspeed_rl.engine.vocab import VocabHead
from mindspeed_rl.models.hf_module import (
    CheckpointNames,
    TensorPlace,
    build_image_module,
    build_module,
    cast_parameters,
    find_place,
    get_decoder,
    list_layers,
    mark_loaded,
    read_hf_config,
)
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource

#: prefix of the names of transformers' module in the module around it
_INNER = "model."
#: dimension of the mesh along which weights are divided
_SHARD = "shard"
#: tokens of a check of the class, and the difference of log-probs that another order of sums in bfloat16 may make
_CHECKED_TOKENS, _HEAD_BOUND = 8, 0.1
#: largest difference of earlier log-probs when the last token changes. Two passes of one shape have equal bits up to rounding
#: in float32. With experts, that token may go to another one and change the batch sizes, and bfloat16 rounds as in the head
_LEAK_BOUND, _EXPERTS = 1e-4, ".experts."


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


@dataclass(frozen=True)
class HeadCheck:
    """A pass that compares the logits of the engine with the class's; see `ShardedModel.check_class`.

    Attributes:
        input_ids: [1, tokens].
    """

    input_ids: Tensor


class PolicyModule(nn.Module):
    """A causal language model that returns results of the predicted tokens instead of logits.

    The head's weight is a parameter of the module that FSDP wraps, so it is there in full while this runs, and the chunks of
    `engine/vocab.py` read it; transformers' own forward would make the logits of all tokens.

    Attributes:
        vocab_size: tokens that have a probability.
    """

    def __init__(self, model: PreTrainedModel, plan: ModelPlan, context: dist.ProcessGroup | None, *, in_float32: bool) -> None:
        super().__init__()
        self.model, self._context = model, context
        self._images = ImageInputs.build(model, plan.model_config.vision)
        self.vocab_size = plan.model_config.vocab_size
        self._softcap, self._in_float32 = plan.model_config.final_logit_softcapping, in_float32

    def forward(self, request: Request | HeadCheck) -> tuple[Tensor, ...]:
        """Compute the results of a micro-batch, [rows, width] float32 each, 0 on padding."""
        weight = cast(nn.Linear, self.model.get_output_embeddings()).weight
        if isinstance(request, HeadCheck):
            return self._compare(request.input_ids, weight)
        micro_batch = request.micro_batch
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
            align=lambda values: align_values(values, micro_batch, self._context),
            position_ids=micro_batch.position_ids,
            inputs={},
        )
        hidden = compute_hidden(self.model, micro_batch, self._context, self._images)
        results = request.outputs.compute(head, _select(hidden, micro_batch.hidden_index))
        # FSDP's hook at the start of the backward pass would be lost by an in-place change of a view
        return tuple(result.clone() for result in results)

    def _compare(self, input_ids: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Return how far log-probs are from the class's, earlier ones from those with another last token, with a bound."""
        other = input_ids.clone()
        other[:, -1] = other[:, 0]
        expected, changed = (self.model(input_ids=ids, use_cache=False).logits[0].float() for ids in (input_ids, other))
        hidden = get_decoder(self.model)(input_ids=input_ids, use_cache=False).last_hidden_state[0]
        logits = hidden.float() @ weight.float().t()
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        expected, changed = expected.log_softmax(-1), changed.log_softmax(-1)
        leak = (changed - expected)[:-1].abs().max()
        regroups = hidden.dtype == torch.bfloat16 and any(_EXPERTS in name for name, _ in self.model.named_parameters())
        bound = leak.new_tensor(_HEAD_BOUND if regroups else _LEAK_BOUND)
        return (logits.log_softmax(-1) - expected).abs().max(), leak, bound


class ValueModule(nn.Module):
    """A language model with one value before each predicted token, under the name of transformers' sequence classifiers."""

    def __init__(self, model: PreTrainedModel, plan: ModelPlan, context: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.model, self._context = model, context
        self._images = ImageInputs.build(model, plan.model_config.vision)
        model.set_output_embeddings(nn.Identity())
        self.score = nn.Linear(plan.model_config.hidden_size, 1, bias=False)
        self.vocab_size = plan.model_config.vocab_size

    def forward(self, request: Request) -> tuple[Tensor, ...]:
        """Compute the values of a micro-batch, [rows, width] float32, 0 on padding."""
        micro_batch = request.micro_batch
        hidden = compute_hidden(self.model, micro_batch, self._context, self._images)
        hidden = _select(hidden, micro_batch.hidden_index)
        values = self.score(hidden)[:, 0].float()
        return tuple(result.clone() for result in align_values([values], micro_batch, self._context))


_HEADS: dict[str, Callable[[PreTrainedModel, ModelPlan, dist.ProcessGroup | None, bool], PolicyModule | ValueModule]] = {
    "lm": lambda model, plan, context, in_float32: PolicyModule(model, plan, context, in_float32=in_float32),
    "reward": lambda model, plan, context, in_float32: ValueModule(model, plan, context),
}


def compute_hidden(
    model: PreTrainedModel, micro_batch: MicroBatch, context: dist.ProcessGroup | None, images: ImageInputs | None
) -> Tensor:
    """Return [tokens, rows, h]: the hidden states that reach the head.

    Padding is after the tokens of a row, none of which attends to it or has a state from it.

    Args:
        context: ranks that divide the tokens of each row; None where this rank has all.
        images: inputs of a model that sees images; None for others.
    """
    decoder = get_decoder(model)
    layout: dict[str, Any] = {}
    if micro_batch.packed is not None:
        bounds = micro_batch.packed.cu_seqlens_q_padded
        longest = micro_batch.packed.max_seqlen_q
        layout = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        layout["shared_prefixes"] = micro_batch.packed.shared
    if images is not None:
        layout |= images.prepare(decoder, micro_batch)
    elif model.config._attn_implementation == PACKED_ATTENTION:
        layout["position_ids"] = micro_batch.position_ids
    if context is not None:
        layout["sequence_split"] = SequenceSplit.build(micro_batch, context)
    if images is None:
        layout["input_ids"] = micro_batch.input_ids
    output = decoder(use_cache=False, **layout)
    return output.last_hidden_state.transpose(0, 1)


def _select(hidden_states: Tensor, index: Tensor) -> Tensor:
    return hidden_states.reshape(-1, hidden_states.size(-1)).index_select(0, index)


@dataclass(frozen=True)
class ShardedModel:
    """A model on this rank, of whose parameters it has shards along the first dimension.

    Attributes:
        module: the root, an FSDPModule.
        names: each parameter by name, in forward order, then those of adapters; a tied head has none of its own. Names are HF
            tensors' names, but where a parameter stacks several.
        buffers: buffers that checkpoints have, which do not train and are full on each rank.
        places: place of each HF tensor.
        shards: ranks that divide each weight; with fewer than all, each range of rows is on several ranks.
        pairs: HF tensor -> the parameters that adapt it; none without adapters.
        adapters: the adapters; None without.
    """

    plan: ModelPlan
    module: PolicyModule | ValueModule
    names: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    places: dict[str, TensorPlace]
    shards: int
    pairs: Mapping[str, AdapterPair] = field(default_factory=dict)
    adapters: ShardedAdapters | None = None

    @property
    def root(self) -> FSDPModule:
        """The root as FSDP's class."""
        return cast(FSDPModule, self.module)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full HF tensor."""
        place = self.places[name]
        owner = self.names.get(place.parameter, self.buffers.get(place.parameter))
        assert owner is not None
        return place.shape(tuple(owner.shape))

    def divide(self, name: str, num_ranks: int) -> list[tuple[int, int]]:
        """Return the first and last row of an HF tensor that each rank has; 0 and 0 for none."""
        place, rows = self.places[name], self.shape(name)[0]
        if place.parameter in self.buffers:
            return [(0, rows)] * num_ranks
        size = self.names[place.parameter].shape[0]
        edges = [first_row(size, self.shards, shard) for shard in range(self.shards + 1)]
        ranges = list(zip(edges, edges[1:]))
        if place.index is not None:
            ranges = [(0, rows) if start <= place.index < stop else (0, 0) for start, stop in ranges]
        return ranges * (num_ranks // self.shards)

    def read_shard(self, parameter: str) -> Tensor:
        """Return this rank's rows of a parameter, which are its memory."""
        return cast(DTensor, self.names[parameter].detach()).to_local()

    def gather(self, parameter: str) -> Tensor:
        """Return a full parameter; collective."""
        return gather_rows(self.names[parameter])

    def read_rows(self, name: str, state: Tensor | None = None) -> tuple[Tensor, int]:
        """Return this rank's rows of an HF tensor, which are the parameter's memory, and the index of the first.

        Args:
            state: this rank's rows of a state of its parameter, in place of those of the parameter.
        """
        place = self.places[name]
        if place.parameter in self.buffers:
            return self.buffers[place.parameter], 0
        local = self.read_shard(place.parameter) if state is None else state
        start = first_row(self.names[place.parameter].shape[0], self.shards, dist.get_rank() % self.shards)
        if place.index is None:
            return local, start
        if not start <= place.index < start + len(local):
            return local.new_empty(0, *self.shape(name)[1:]), 0
        return place.select(local[place.index - start]), 0

    def list_matrices(self) -> set[str]:
        """Return the names of the parameters of adapters."""
        return {name for pair in self.pairs.values() for name in (pair.a, pair.b)}

    def list_trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name; with adapters these and a score head."""
        return {name: parameter for name, parameter in self.names.items() if parameter.requires_grad}

    def read_gradients(self, find: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
        """Return a copy of the full gradients by HF name, and of adapters by their own names; collective.

        Args:
            find: returns the gradient of a parameter, divided as the parameter is.
        """
        found = {name: find(parameter) for name, parameter in self.names.items()}
        full = {name: gather_rows(gradient) for name, gradient in found.items() if gradient is not None}
        gradients = {name: full[place.parameter] for name, place in self.places.items() if place.parameter in full}
        places = ((name, gradient, self.places[name]) for name, gradient in gradients.items())
        read = {
            name: place.find(gradient).clone(memory_format=torch.contiguous_format) for name, gradient, place in places
        }
        return read | {name: full[name].clone() for name in self.list_matrices() & full.keys()}

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Fill this rank's rows from HF tensors, reading no other ones.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        for name in self.places:
            rows, start = self.read_rows(name)
            if tuple(source.shape(name)) != self.shape(name):
                raise ValueError(f"{name}: {tuple(source.shape(name))} does not fit the model's {self.shape(name)}.")
            if len(rows):
                rows.copy_(source.read(name, 0, start, start + len(rows)))

    @torch.no_grad()
    def load_states(self, source: TensorSource, states: Mapping[str, Tensor]) -> None:
        """Fill this rank's rows of a state of parameters from the same state of HF tensors.

        Args:
            source: the state of HF tensors.
            states: this rank's rows, by parameter.

        Raises:
            ValueError: a tensor is missing.
        """
        for name in (name for name, place in self.places.items() if place.parameter in states):
            rows, start = self.read_rows(name, states[self.places[name].parameter])
            if len(rows):
                rows.copy_(source.read(name, 0, start, start + len(rows)))

    @torch.no_grad()
    def check_class(self) -> None:
        """Check on a few tokens that the class computes logits as the engine does, and from earlier tokens only; collective.

        Raises:
            ValueError: it does not: it scales them, for example, or attends in both directions.
        """
        if not isinstance(self.module, PolicyModule):
            return
        device = next(iter(self.names.values())).device
        tokens = torch.arange(_CHECKED_TOKENS, device=device)[None] % self.plan.model_config.vocab_size
        difference, leak, bound = map(float, self.module(HeadCheck(tokens)))
        self.root.reshard()
        name = type(self.module.model).__name__
        if not difference < _HEAD_BOUND:
            raise ValueError(
                f"engine: fsdp: the head of {name} is not its weight times the hidden state, which is what the engine "
                f"computes: log-probs differ by {difference:.3g}"
            )
        if not leak < bound:
            raise ValueError(
                f"engine: fsdp: {name} sees later tokens, and no policy can: with another token at the end of a row, earlier "
                f"log-probs differ by {leak:.3g}"
            )


def first_row(size: int, num_ranks: int, rank: int) -> int:
    """Return the first row that a rank has of a tensor with so many rows, which FSDP divides as `torch.chunk` does."""
    return min(rank * -(-size // num_ranks), size)


def build_sharded_model(config: MegatronConfig, plan: ModelPlan, hf_folder: Path, *, trains: bool) -> ShardedModel:
    """Build a model with empty weights, of which no rank ever has all; collective over the training world.

    Weights that train are float32, and computed with in bfloat16 where the run file has `bf16`; those that do not train are in
    the format that they are computed with.

    Raises:
        ValueError: transformers has no such model, or it has another form than the engine computes.
    """
    hf_config = read_hf_config(hf_folder, "engine: fsdp", trusts_code=config.trust_remote_code)
    compute = torch.bfloat16 if config.bf16 else torch.float32
    settings, adaptation = LoraSettings.from_config(config), None
    with torch.device("meta"):
        model = _build_module(hf_config, packs=plan.architecture.packs, sees_images=plan.model_config.vision is not None)
        context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        module = _HEADS[plan.model_config.head](model, plan, context, bool(config.fp32_lm_head))
        places = _find_places(module, plan)
        if settings is not None:
            adaptation = adapt_module(model, plan, settings, places, config.adapted_parts)
    if adaptation is None:
        choose_trained(model.named_parameters(), config.trained_tower_parts)
        _freeze_indexers(module, plan, places)
    cast_parameters(module, compute)
    for parameter in module.parameters():  # those that the class or adapters freeze stay so
        parameter.requires_grad_(trains and parameter.requires_grad)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    device = platform.current().current_device()
    mesh = _build_mesh(device.type, config.fsdp_size)
    _shard(module, mesh, MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32))
    module.to_empty(device=device)
    # or the next call would give it random values; it makes only buffers, such as rotary frequencies
    mark_loaded(module)
    model.initialize_weights()
    if trains and config.recompute_granularity == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shards = mesh[_SHARD].size()
    parameters, buffers = _list_values(module)
    names = dict.fromkeys(place.parameter for place in places.values() if place.parameter in parameters)
    matrices = () if adaptation is None else (name for pair in adaptation.pairs.values() for name in (pair.a, pair.b))
    ordered = {name: parameters[name] for name in (*names, *matrices)}
    if adaptation is None:
        return ShardedModel(plan, module, ordered, buffers, places, shards)
    adapters = ShardedAdapters(plan, adaptation, ordered)
    adapters.init(config.seed)
    return ShardedModel(plan, module, ordered, buffers, places, shards, adaptation.pairs, adapters)


def _freeze_indexers(module: PolicyModule | ValueModule, plan: ModelPlan, places: Mapping[str, TensorPlace]) -> None:
    """Freeze what chooses the tokens of sparse attention, as on Megatron's engine: no loss of the model reaches it."""
    parameters, _ = _list_values(module)
    for op in plan.architecture.weight_ops(plan.model_config):
        if ".indexer." in op.mcore:
            for name in op.hf:
                parameters[places[name].parameter].requires_grad_(False)


def _build_mesh(device_type: str, shards: int | None) -> DeviceMesh:
    """Return the mesh of the training world: of ranks that divide each weight, or of groups of these that have copies."""
    size = dist.get_world_size()
    if shards is None or shards == size:
        return init_device_mesh(device_type, (size,), mesh_dim_names=(_SHARD,))
    return init_device_mesh(device_type, (size // shards, shards), mesh_dim_names=("replicate", _SHARD))


def _build_module(hf_config: PretrainedConfig, *, packs: bool, sees_images: bool) -> PreTrainedModel:
    register()
    # without packed rows the attention of the class, with its own masks
    settings = {"attn_implementation": PACKED_ATTENTION} if packs else {}
    model = (build_image_module if sees_images else build_module)(hf_config, **settings)
    # rows have no padding that trains, so that this token is one like all others, as in Megatron
    cast(nn.Embedding, model.get_input_embeddings()).padding_idx = None
    return model


def _shard(module: PolicyModule | ValueModule, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """Shard each decoder layer by itself, and all else with the root."""
    for layer in list_layers(module.model).values():
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # sums: the step divides once, by the tokens of all ranks; gloo has no other reduction
            part.set_force_sum_reduction_for_comms(True)
            if mesh.size() > 1:  # without a factor torch divides the sum by the ranks; groups of one rank copy a layer for it
                part.set_gradient_divide_factor(1.0)
            if mesh[_SHARD].size() == 1:
                part.set_custom_reduce_scatter(build_uncopied_reduction())
    # the result of a reduction without copies is the gradient only where it is not cast
    trained = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    assert trained <= {precision.reduce_dtype}, f"weights that train are {trained}"


def _list_values(module: PolicyModule | ValueModule) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Return the parameters and the buffers that checkpoints have, by name."""
    state = module.state_dict()
    parameters = {name.removeprefix(_INNER): parameter for name, parameter in module.named_parameters()}
    return parameters, {name.removeprefix(_INNER): buffer for name, buffer in module.named_buffers() if name in state}


def find_places(plan: ModelPlan) -> dict[str, TensorPlace]:
    """Return the place of each HF tensor in the parameters of a model without adapters, which is not built.

    Raises:
        ValueError: transformers has no such model, or its weights are not those of the family's table.
    """
    # transformers changes parts of what it is given
    keys: dict[str, Any] = copy.deepcopy(dict(plan.hf_config))
    with torch.device("meta"):
        model = _build_module(AutoConfig.for_model(**keys), packs=False, sees_images=plan.model_config.vision is not None)
        return _find_places(_HEADS[plan.model_config.head](model, plan, None, False), plan)


def _find_places(module: PolicyModule | ValueModule, plan: ModelPlan) -> dict[str, TensorPlace]:
    """Return the place of each HF tensor in a model without adapters.

    Raises:
        ValueError: its weights are not the tensors of the family's table of weights.
    """
    found, buffers = _list_values(module)
    names, values = CheckpointNames(module.model, buffers=True), {**found, **buffers}
    places: dict[str, TensorPlace] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for op in plan.architecture.weight_ops(plan.model_config):
        if op.copy_of_tied:
            continue
        for name, shape in zip(op.hf, op.shapes):
            place = None if name in values else find_place(names, name, values)
            places[name], shapes[name] = TensorPlace(name) if place is None else place[0], shape
    model = ShardedModel(plan, module, found, buffers, places, 1)
    differing = {*found, *buffers} ^ {place.parameter for place in places.values()}
    differing |= {name for name in places if places[name].parameter not in differing and model.shape(name) != shapes[name]}
    if differing:
        raise ValueError(
            f"{type(module.model).__name__} of this transformers has other weights than {plan.architecture.name}: "
            f"{min(differing)}; set engine: megatron for the role."
        )
    return places

"""Models of many clients on one base in a training engine: adapters or full weights, passes, steps and their folders.

Each model is an adapter with the state of its own AdamW. Passes that wait together are computed together: what the base
computes token by token once for all of them, the adapters, attention, head and loss of each by operations of their own, so that
gradients and weights of a model have the bits that they have without the others. Where a token's bits depend on other tokens
(`_can_join_passes`), each pass has rows of one model only. The gradient of a model is the float32 sum of its passes since its
last step.

Without `lora_target_modules` there is one model, and the slot is all weights.

With several ranks each has all models in full, and gets all calls in the same order: they are collective where nothing else is
said. Matrices are small next to the base, so a rank takes its shards of them for a pass, computes the rows of its data-parallel
rank, and has the sum of all gradients afterwards; steps are then the same everywhere.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_rl import adaptors
from mindspeed_rl.algorithms.call_losses import compute_call_loss
from mindspeed_rl.algorithms.interfaces import LossInputs
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.adapter_slot import AdapterSlot, SlotRows
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.head_outputs import HeadOutputs, HeadPass
from mindspeed_rl.engine.interface import NonFiniteError
from mindspeed_rl.engine.lora import ATTENTION_TARGETS, MLP_TARGETS
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.train_engine import LossRequest, TrainEngine
from mindspeed_rl.engine.vocab import compute_vocab_log_probs
from mindspeed_rl.engine.weight_slot import WeightSlot
from mindspeed_rl.service.backend import (
    AdamParams,
    AdapterSpec,
    CallError,
    Capabilities,
    Datum,
    LossCall,
    PassCall,
    PassResult,
    check_data,
    drop_seed,
)
from mindspeed_rl.service.model_folder import ADAPTER, TENSORS, ModelRecord, building
from mindspeed_rl.service.ranks import ServiceRanks

_LOG = logging.getLogger(__name__)
#: matrices of the output layer, next to the slot's matrices
HEAD_A, HEAD_B = "lm_head.lora_A", "lm_head.lora_B"


@dataclass(frozen=True)
class _CallHead(HeadOutputs):
    """Log-probs of targets, one or several per token, under the output layer with a model's adapter of it.

    Attributes:
        a, b: [r, h] and [v, r]; None without an adapter.
        scale: factor of B A.
        num_targets: targets per token, in the column "targets"; 0 for one, the label.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    num_targets: int = 0

    @property
    def count(self) -> int:  # pyrefly: ignore[bad-override]  (a property in place of a constant)
        """Number of the results."""
        return max(1, self.num_targets)

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute them, [rows, width] each."""
        micro_batch, weight, vocab = head.micro_batch, head.weight, head.vocab
        if self.a is not None and self.b is not None:
            inner = functional.linear(hidden, self.a.to(hidden.dtype)) * self.scale
            first, end = vocab.first_id(weight), vocab.first_id(weight) + len(weight)
            # this rank's rows; the last ones are padding of the vocabulary
            own = functional.pad(self.b[first:end], (0, 0, 0, len(weight) - len(self.b[first:end])))
            vocab, weight = replace(vocab, frozen=weight, adds_to_main_grad=False), own.to(weight.dtype)
            hidden = torch.cat([hidden, inner], 1)
        if not self.num_targets:
            return head.align(compute_vocab_log_probs(hidden, weight, micro_batch.labels, vocab)[:1])
        ids = micro_batch.columns["targets"].flatten(0, 1).index_select(0, micro_batch.slots)
        log_probs = compute_vocab_log_probs(hidden, weight, micro_batch.labels, vocab, others=ids)[2]
        return head.align(log_probs.unbind(1))


@dataclass
class ClientModel:
    """A client's model.

    Attributes:
        spec: as the client asked for it; None for full weights.
        settings: rank, scale and layers of its adapter; None likewise.
        matrices: float32, by name; their `grad` is the gradient that waits for a step, None without one.
        optimizer: its AdamW.
        averages: moving averages of the matrices, by name; empty where samplers have the last weights.
        num_steps: steps that it has made.
    """

    spec: AdapterSpec | None
    settings: LoraSettings | None
    matrices: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    averages: dict[str, Tensor] = field(default_factory=dict)
    num_steps: int = 0

    def average(self, decay: float) -> None:
        """Move the averages by a step: they begin with the first step's matrices."""
        for name, parameter in self.matrices.items():
            if name in self.averages:
                self.averages[name].lerp_(parameter.detach(), 1 - decay)
            else:
                self.averages[name] = parameter.detach().clone()


@dataclass(frozen=True)
class _Prepared:
    """A pass that was checked.

    Attributes:
        rows: its data.
        leaves: the model's matrices, whose `grad` is the gradient of only this pass; none for full weights.
        outputs: results of the head.
    """

    call: PassCall
    model: ClientModel
    rows: Rows
    leaves: Mapping[str, Tensor]
    outputs: _CallHead

    @property
    def settings(self) -> LoraSettings:
        """Settings of the model's adapter."""
        assert self.model.settings is not None
        return self.model.settings

    def compute_loss(self, inputs: LossInputs) -> Tensor:
        """Compute the loss of each token of a micro-batch."""
        return compute_call_loss(self.call.loss.name, self.call.loss.config, inputs)


def _build_optimizer(matrices: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(matrices.values()), lr=0.0, foreach=False)


class ClientModels:
    """Models on one base; every method runs to its end, one at a time. `Backend` describes the calls.

    Attributes:
        capabilities: what is offered.
        num_joined_passes: passes that had tokens of several models.
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: MegatronConfig,
        batching: MicroBatching,
        offered: Capabilities,
        *,
        ema_decay: float = 0.0,
    ) -> None:
        """Take an engine that has the base.

        Args:
            engine: without an optimizer; its adapters are the slot.
            config: keys of the base.
            batching: limits of a micro-batch.
            offered: what is offered, without the largest rank.
            ema_decay: decay of the moving averages with which models are sampled; 0 for none.
        """
        self._engine, self._config, self._batching, self._ema_decay = engine, config, batching, ema_decay
        self._ranks = ServiceRanks.from_world()
        self._trains_all = offered.full_weights
        if self._trains_all:
            engine.start_gradients()
        self._slot: AdapterSlot | WeightSlot = (WeightSlot if self._trains_all else AdapterSlot)(engine.model)
        self.capabilities = replace(offered, max_rank=self._slot.rank)
        self.num_joined_passes = 0
        self._joins_passes = self._can_join_passes()
        self._filled: tuple[str, int] | None = None
        self._models: dict[str, ClientModel] = {}

    def _can_join_passes(self) -> bool:
        """Return whether tokens of several models in one pass have the bits that they have in passes of their own."""
        config = self._engine.model.transformer_config
        # sums over more than two ranks, and over slices of a sequence, depend on the place of a token
        sums_alike = config.tensor_model_parallel_size <= 2 and not config.sequence_parallel
        return adaptors.has_row_exact_products() and sums_alike and self._engine.shape.packed and not config.num_moe_experts

    # ------------------------------------------------------------------ models

    def create_model(self, model_id: str, spec: AdapterSpec | None) -> None:
        """See `Backend.create_model`."""
        self._check_new(model_id, spec)
        self._models[model_id] = self._build_model(spec, self._init_matrices(model_id, spec))

    def _check_new(self, model_id: str, spec: AdapterSpec | None) -> None:
        offered = self.capabilities
        if (spec is None) != self._trains_all:
            needs = "full weights, no adapters; leave it out" if self._trains_all else "adapters, no full weights; give a rank"
            raise CallError(f"lora_config: this server trains {needs}.")
        if spec is not None and spec.rank > offered.max_rank:
            raise CallError(f"lora_config.rank: {spec.rank} is above this server's {offered.max_rank}.")
        if spec is not None and not self._list_targets(spec) and not spec.train_unembed:
            raise CallError("lora_config: none of the layers that this server adapts would be trained.")
        if model_id in self._models:
            raise CallError(f"model {model_id} exists already.")
        if len(self._models) >= offered.num_slots:
            raise CallError(
                f"all {offered.num_slots} models of this server are in use; unload one, or wait for a session to end."
            )

    def _list_targets(self, spec: AdapterSpec) -> tuple[str, ...]:
        named = (*(ATTENTION_TARGETS if spec.train_attn else ()), *(MLP_TARGETS if spec.train_mlp else ()))
        return tuple(target for target in named if target in (self._config.lora_target_modules or ()))

    def _build_settings(self, spec: AdapterSpec | None) -> LoraSettings | None:
        if spec is None:
            return None
        return LoraSettings(spec.rank, self._config.lora_alpha, 0.0, self._list_targets(spec))

    def _init_matrices(self, model_id: str, spec: AdapterSpec | None) -> dict[str, Tensor]:
        if spec is None:
            return self._slot.init(None, 0)
        seed = spec.seed
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7], "big")
        matrices = self._slot.init(self._build_settings(spec), seed)
        if spec.train_unembed:
            config = self._engine.plan.model_config
            generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(f"{seed}/lm_head".encode()).digest()[:7], "big")
            )
            bound = 1.0 / math.sqrt(config.hidden_size)
            matrices[HEAD_A] = torch.empty(spec.rank, config.hidden_size).uniform_(-bound, bound, generator=generator)
            matrices[HEAD_B] = torch.zeros(config.vocab_size, spec.rank)
        return matrices

    def _build_model(self, spec: AdapterSpec | None, matrices: Mapping[str, Tensor]) -> ClientModel:
        # sorted, as in a file: the norm of the gradient adds them up in this order. Copies: tensors of a file begin at any
        # address, and products of such a matrix may round otherwise
        parameters = {name: nn.Parameter(_copy(matrices[name], self._engine.device)) for name in sorted(matrices)}
        return ClientModel(spec, self._build_settings(spec), parameters, _build_optimizer(parameters))

    def _find(self, model_id: str) -> ClientModel:
        if model_id not in self._models:
            raise CallError(f"model {model_id} does not exist.")
        return self._models[model_id]

    def unload(self, model_id: str) -> None:
        """See `Backend.unload`."""
        self._find(model_id)
        del self._models[model_id]
        if self._filled is not None and self._filled[0] == model_id:
            self._filled = None

    def _fill_slot(self, model_id: str, model: ClientModel) -> None:
        """Compute with this model from now on."""
        if self._filled != (model_id, model.num_steps):
            self._filled = None
            self._slot.fill(model.matrices, model.settings)
            self._filled = (model_id, model.num_steps)

    # ------------------------------------------------------------------ passes and steps

    def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, forward_only: bool = False
    ) -> PassResult:
        """See `Backend.forward_backward`."""
        (result,) = self.run_passes([PassCall(model_id, data, loss, forward_only)])
        if isinstance(result, Exception):
            raise result
        return result

    def run_passes(self, calls: Sequence[PassCall]) -> list[PassResult | Exception]:
        """Compute passes of several models together, as far as that leaves the bits of each as they are alone.

        Args:
            calls: one of each model at most; either all train, or none does.

        Returns:
            Result or error of each; an error of one changes nothing for the others.

        Raises:
            Exception: with several ranks, or one call, what failed; no gradient was added.
        """
        results: dict[int, PassResult | Exception] = {}
        prepared: dict[int, _Prepared] = {}
        for index, call in enumerate(calls):
            try:
                prepared[index] = self._prepare(call)
            except CallError as error:
                results[index] = error
        compute = self._compute_full if self._trains_all else self._compute
        try:
            results |= zip(prepared, compute(list(prepared.values())))
        except Exception:
            # of several ranks perhaps only this one has failed, and the others wait for it
            if len(prepared) < 2 or self._ranks.size > 1:
                raise
            # what fails together may be the fault of one
            _LOG.exception("a joint pass of %d models failed; each is computed alone", len(prepared))
            results |= {index: self._run_alone(calls[index]) for index in prepared}
        return [results[index] for index in range(len(calls))]

    def _run_alone(self, call: PassCall) -> PassResult | Exception:
        """Compute a pass after a joint one that failed, whose leaves may have a part of its gradient."""
        try:
            return self.run_passes([call])[0]
        except Exception as error:  # noqa: BLE001  (raised where this call waits)
            return error

    def _prepare(self, call: PassCall) -> _Prepared:
        model = self._find(call.model_id)
        check_data(call.data, call.loss, self.capabilities)
        rows, num_targets = _build_rows(call.data)
        rows = self._ranks.select_rows(rows)
        # leaves of only this pass: a failed one leaves nothing behind
        leaves: dict[str, Tensor] = {}
        if not self._trains_all:
            leaves = {name: own.detach().requires_grad_(not call.forward_only) for name, own in model.matrices.items()}
        scale = 1.0 if model.settings is None else model.settings.scale
        outputs = _CallHead(leaves.get(HEAD_A), leaves.get(HEAD_B), scale=scale, num_targets=num_targets)
        return _Prepared(call, model, rows, leaves, outputs)

    def _compute(self, passes: Sequence[_Prepared]) -> list[PassResult | CallError]:
        """Compute passes of models with adapters."""
        if not passes:
            return []
        slot = self._slot
        assert isinstance(slot, AdapterSlot)

        def adapting(spans: Sequence[tuple[int, int | None]]) -> AbstractContextManager[None]:
            own = [(passes[index], num_tokens) for index, num_tokens in spans]
            self.num_joined_passes += len(own) > 1
            return slot.adapting([SlotRows(count, each.leaves, each.settings) for each, count in own])

        requests = [LossRequest(each.rows, each.compute_loss, each.outputs) for each in passes]
        training = not passes[0].call.forward_only
        computed = self._engine.compute_requests(
            requests, self._batching, adapting, training=training, joins=self._joins_passes
        )
        finished = [self._finish(each, results) for each, results in zip(passes, computed)]
        # only now: a failure up to here has changed no model
        for each, (_, gradients) in zip(passes, finished):
            for name, gradient in gradients.items():
                parameter = each.model.matrices[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return [result for result, _ in finished]

    def _finish(
        self, each: _Prepared, results: tuple[list[Tensor], ...]
    ) -> tuple[PassResult | CallError, Mapping[str, Tensor]]:
        """Return the result of a pass, and its gradient to add to the model's."""
        *log_probs, losses = self._ranks.gather_rows(results, len(each.call.data))
        wrong = [index for index, row in enumerate(losses) if not row.isfinite().all()]
        gradients: dict[str, Tensor] = {}
        if not each.call.forward_only:
            assert isinstance(self._slot, AdapterSlot)
            gradients = self._ranks.sum_gradients(each.leaves, self._slot.drop_repeated)
        if wrong or not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            what = f"the loss of data[{wrong[0]}]" if wrong else "the gradient"
            text = f"{each.call.loss.name}: {what} is not finite, nothing was changed; check logprobs, advantages and weights."
            return CallError(text), {}
        return _build_result(each.call.data, log_probs, losses), gradients

    def _compute_full(self, passes: Sequence[_Prepared]) -> list[PassResult | CallError]:
        """Compute passes of the model that trains all weights."""
        return [self._compute_weights(each) for each in passes]

    def _compute_weights(self, each: _Prepared) -> PassResult | CallError:
        call, model = each.call, each.model
        self._fill_slot(call.model_id, model)
        if call.forward_only:
            results = self._engine.forward(each.rows, self._batching, each.outputs)
            assert results is not None  # a world of one rank
            losses = [_compute_host_loss(each.compute_loss, each.rows, results, index) for index in range(len(call.data))]
            return _build_result(call.data, results, losses)
        try:
            computed = self._engine.compute_gradients(each.rows, self._batching, each.compute_loss, each.outputs)
        except NonFiniteError as error:
            return CallError(f"{call.loss.name}: {error}; check logprobs, advantages and weights.")
        assert computed is not None
        *results, losses = computed
        assert isinstance(self._slot, WeightSlot)
        for name, gradient in self._slot.read_gradients(model.matrices).items():
            parameter = model.matrices[name]
            parameter.grad = gradient.float().clone() if parameter.grad is None else parameter.grad.add_(gradient)
        return _build_result(call.data, results, losses)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `Backend.optim_step`."""
        model = self._find(model_id)
        parameters = list(model.matrices.values())
        for parameter in parameters:
            if parameter.grad is None:  # no pass: a step with a gradient of 0, as moments and decay go on
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters], foreach=False)
        if not norm.isfinite():
            model.optimizer.zero_grad()
            raise CallError(
                f"optim_step: the norm of the gradient is {norm.item()}; the gradient was dropped, no weight changed."
            )
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, params.grad_clip_norm, norm, foreach=False)
        for group in model.optimizer.param_groups:
            group |= {
                "lr": params.learning_rate,
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay,
            }
        model.optimizer.step()
        model.optimizer.zero_grad()
        model.num_steps += 1
        if self._ema_decay:
            model.average(self._ema_decay)
        return {"grad_norm:mean": norm.item(), "step:max": float(model.num_steps)}

    # ------------------------------------------------------------------ folders

    def save_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """See `Backend.save_state`."""
        model = self._find(model_id)
        self._ranks.run_on_first(lambda: self._write_state(model, folder, with_optimizer=with_optimizer))

    def _write_state(self, model: ClientModel, folder: Path, *, with_optimizer: bool) -> None:
        with building(folder) as partial_folder:
            tensors = {name: parameter.detach() for name, parameter in model.matrices.items()}
            tensors |= {f"average/{name}": value for name, value in model.averages.items()}
            if with_optimizer:
                tensors |= {f"{kind}/{name}": value for kind, name, value in _list_moments(model)}
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial_folder / TENSORS)
            record = ModelRecord(model.spec, self.capabilities.base_model, model.num_steps, with_optimizer)
            record.write(partial_folder)
            if not self._trains_all:  # full weights are there already; `export_adapter` writes them for transformers
                self._write_peft(model, partial_folder / ADAPTER)

    def load_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """See `Backend.load_state`."""
        record = self._read_record(folder)
        spec = record.spec
        if with_optimizer and not record.has_optimizer:
            raise CallError(f"{folder} was saved without the optimizer's state; load it without.")
        existing = self._models.get(model_id)
        if existing is None:
            self._check_new(model_id, spec)
        elif drop_seed(existing.spec) != drop_seed(spec):
            raise CallError(f"{folder} has another adapter than model {model_id}: {spec}, not {existing.spec}.")
        tensors = load_file(folder / TENSORS)
        model = self._build_model(spec, {name: tensor for name, tensor in tensors.items() if "/" not in name})
        if with_optimizer:
            model.num_steps = record.num_steps
            _load_moments(model, tensors)
        if self._ema_decay:
            averages = {name: tensors[f"average/{name}"] for name in model.matrices if f"average/{name}" in tensors}
            model.averages = {name: _copy(tensor, self._engine.device) for name, tensor in averages.items()}
        self._models[model_id] = model
        if self._filled is not None and self._filled[0] == model_id:
            self._filled = None

    def _read_record(self, folder: Path) -> ModelRecord:
        record = ModelRecord.read(folder, self.capabilities.base_model)
        if (record.spec is None) != self._trains_all:
            kinds = ("full weights", "adapters")
            has, trains = kinds if record.spec is None else kinds[::-1]
            raise CallError(f"{folder} has {has}, and this server trains {trains}.")
        return record

    def _write_peft(self, model: ClientModel, folder: Path) -> None:
        """Write the matrices that a model samples with; not collective."""
        assert model.settings is not None and isinstance(self._slot, AdapterSlot)
        matrices: Mapping[str, Tensor] = model.averages or model.matrices
        head: dict[str, tuple[Tensor, Tensor]] = {}
        if HEAD_A in matrices:
            head["lm_head"] = matrices[HEAD_A].detach().cpu(), matrices[HEAD_B].detach().cpu()
        self._slot.save_peft(matrices, model.settings, folder, str(self.capabilities.base_model_folder), others=head)


def _build_result(data: Sequence[Datum], log_probs: Sequence[Sequence[Tensor]], losses: Sequence[Tensor]) -> PassResult:
    outputs = [
        _build_output(datum, [column[index] for column in log_probs], losses[index]) for index, datum in enumerate(data)
    ]
    return PassResult(tuple(outputs), {"loss:sum": math.fsum(float(term) for row in losses for term in row)})


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a float32 copy in memory of torch's own alignment."""
    return tensor.to(device, torch.float32, copy=True, memory_format=torch.contiguous_format)


def _build_rows(data: Sequence[Datum]) -> tuple[Rows, int]:
    """Return the rows of a call, and the targets per token where some datum has several (else 0)."""
    targets = [np.asarray(datum.inputs["target_tokens"], np.int64) for datum in data]
    num_targets = max((array.shape[1] for array in targets if array.ndim == 2), default=0)
    names = {name for datum in data for name in datum.inputs} - {"target_tokens"}
    columns: dict[str, list[Tensor]] = {}
    for name in sorted(names):
        values = [np.asarray(datum.inputs[name], np.float32) for datum in data]
        columns[name] = [torch.from_numpy(_widen(array, num_targets).copy()) for array in values]
    if num_targets:
        columns["targets"] = [torch.from_numpy(_widen(array, num_targets).copy()) for array in targets]
    return (
        Rows(
            input_ids=[torch.tensor(datum.tokens, dtype=torch.int64) for datum in data],
            prompt_lengths=[1] * len(data),
            columns=columns,
            targets=[torch.from_numpy((array if array.ndim == 1 else array[:, 0]).copy()) for array in targets],
        ),
        num_targets,
    )


def _widen(values: np.ndarray, num_targets: int) -> np.ndarray:
    """Return [N, num_targets] with zeros for targets that a datum does not have; [N] where there is one for all."""
    if not num_targets:
        return values
    values = values[:, None] if values.ndim == 1 else values
    return np.pad(values, ((0, 0), (0, num_targets - values.shape[1])))


def _compute_host_loss(compute: Any, rows: Rows, results: Sequence[Sequence[Tensor]], index: int) -> Tensor:
    """Return the terms of a row's loss from its log-probs."""
    outputs = tuple(column[index][None] for column in results)
    columns = {name: values[index][None] for name, values in rows.columns.items()}
    return compute(LossInputs(outputs, torch.ones_like(outputs[0], dtype=torch.bool), columns))[0]


def _build_output(datum: Datum, log_probs: Sequence[Tensor], losses: Tensor) -> dict[str, Any]:
    targets = datum.inputs["target_tokens"]
    if targets.ndim == 2:
        return {"logprobs": torch.stack(list(log_probs), -1)[:, : targets.shape[1]].float().numpy()}
    return {"logprobs": log_probs[0].float().numpy(), "elementwise_loss": losses.float().numpy()}


def _list_moments(model: ClientModel) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name of the matrix, moment), zeros before the first step."""
    for name, parameter in model.matrices.items():
        state = model.optimizer.state.get(parameter, {})
        for kind in ("exp_avg", "exp_avg_sq"):
            yield kind, name, state.get(kind, torch.zeros_like(parameter))


def _load_moments(model: ClientModel, tensors: Mapping[str, Tensor]) -> None:
    if not model.num_steps:
        return
    for name, parameter in model.matrices.items():
        model.optimizer.state[parameter] = {
            "step": torch.tensor(float(model.num_steps)),
            **{kind: _copy(tensors[f"{kind}/{name}"], parameter.device) for kind in ("exp_avg", "exp_avg_sq")},
        }

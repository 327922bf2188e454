"""Trainer and rollout engine on the same tokens, layer by layer; `train_vs_rollout.py` joins the outputs of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config.quantized_formats import find_format
from mindspeed_rl.dumps.causes import EngineOutputs, TrainerOutputs, WeightFinding
from mindspeed_rl.dumps.record import Cut
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.engine.probe import ModelProbe
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.quantization import quantize_tensors
from mindspeed_rl.rollout.engine_probe import EngineProbe
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import sample_seed
from mindspeed_rl.run import Run
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.roles import Role, build_pass_settings
from mindspeed_rl.workers.rollout_replica import RolloutReplica

#: factor on the weights of the first push: changes every element, and is undone to the bit
_SCALE = 2.0


@dataclass
class _TensorCollector:
    """A sink that collects tensors in memory.

    Attributes:
        tensors, cuts: by name.
    """

    takes_backward: ClassVar[bool] = False

    tensors: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[str, Cut | None] = field(default_factory=dict)

    def add(
        self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False,
        kind: str = "Tensor", is_gradient: bool = False,
    ) -> None:  # fmt: skip
        """See `dumps.record.Sink.add`."""
        self.tensors[name] = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None, copy=True)
        self.cuts[name] = cut


class ComparisonWorker(DeviceWorker):
    """One rank's actor and rollout engine, as in training but without an optimizer. All methods are collective."""

    def __init__(self, run: Run, run_id: str, *, rank: int) -> None:
        """Join the training world and build the actor and the engine.

        Args:
            run_id: unique to the run and equal on all its ranks.
        """
        super().__init__(run, rank)
        config = run.config.actor_config
        source, plan = run.models["actor"].source, run.models["actor"].plan
        init_distributed(config, plan.layout.vpp)
        tokenizer = load_tokenizer_of(config, source)
        passes = build_pass_settings(run, tokenizer)
        self.role = Role("actor", run.models["actor"], passes, steps_per_iteration=None)
        # vLLM refuses to start on a device with less free memory than it is to use
        self.role.offloader.offload(params=run.generate.offload_train_param)
        self.rollout = RolloutReplica(run, None, tokenizer, run_id)
        self.vocab_size = plan.model_config.vocab_size
        self.notes: list[str] = []

    # ------------------------------------------------------------------ weights

    def push_twice(self) -> None:
        """Push other weights, then the trained ones as in training: a parameter that keeps the other ones is stale."""
        self.role.offloader.onload(params=True)
        weights = [weight.tensor for weight in self.role.megatron_stream.local_weights.values()]
        _scale(weights, _SCALE)
        self._push(0)
        self._before = _copies(self.rollout.engine.get_model())
        _scale(weights, 1.0 / _SCALE)
        self._push(1)
        self.role.offloader.offload(params=self.run.generate.offload_train_param)
        self.rollout.engine.restore_memory("cache")

    def _push(self, version: int) -> None:
        try:
            self.rollout.load(self.role.stream, version)
        except WeightDeliveryError as error:
            self.notes.append(str(error))

    def check_weights(self) -> tuple[list[WeightFinding], list[str]]:
        """Return the parameters that differ from what the engine's own loader makes of the trained weights, and notes.

        The engine holds nothing of use afterwards, and its memory is the trainer's.
        """
        engine = self.rollout.engine
        self.role.offloader.onload(params=True)
        pushed = _copies(engine.get_model())
        assert self.rollout.push is not None
        tensors = self.rollout.push.tensors_by_parameter()
        named = self.role.stream.named_tensors(self.rollout.dtype)
        quantization = self.run.generate.quantization
        if quantization is not None:
            found = (tensor.dtype for name, tensor in pushed.items() if name.endswith("_scale") and tensor.is_floating_point())
            scales = next(found, self.rollout.dtype)  # formats with scales of their own type need none
            named = quantize_tensors(named, find_format(quantization, self.run.platform), scales)
        engine.load_weights(named, 2)
        findings = []
        for name, expected in _copies(engine.get_model()).items():
            differs = pushed[name] != expected
            if not bool(differs.any()):
                continue
            fault: Literal["stale", "rearranged", "other"] = "other"
            # the values of the first push: the second one did not reach it
            if torch.equal(pushed[name], self._before[name]):
                fault = "stale"
            elif torch.equal(*(weights.flatten().sort().values for weights in (pushed[name], expected))):
                fault = "rearranged"
            findings.append(WeightFinding(name, tensors.get(name, ()), fault, float(differs.float().mean())))
        if self.rollout.swaps_memory:
            engine.release_memory()
        return findings, self.notes

    # ------------------------------------------------------------------ the same tokens

    def generate(self, prompt_ids: Sequence[int], num_tokens: int, index: int) -> EngineOutputs | None:
        """Return the engine's response to one prompt with its activations; None off the first rank of the first replica."""
        engine, collected = self.rollout.engine, _TensorCollector()
        engine.reset_prefix_cache()
        sampling = replace(engine.sampling, max_tokens=min(num_tokens, engine.sampling.max_tokens))

        async def respond() -> Generated:
            return await self.rollout.in_process.generate(tuple(prompt_ids), sampling, sample_seed(1, index, 0, 0))

        with EngineProbe(engine.get_model(), collected).recording():
            generated = self.rollout.in_process.run(respond)
        if generated is None or self.rollout.replica:
            return None
        return _build_outputs(generated, len(prompt_ids), collected, self.vocab_size)

    def forward(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TrainerOutputs:
        """Return the trainer's log-probs of the response and its activations."""
        self.role.offloader.onload(params=True)
        row = Rows([torch.tensor([*prompt_ids, *response_ids])], [len(prompt_ids)])
        collected = _TensorCollector()
        with ModelProbe(self.role.megatron, collected).recording():
            output = self.role.engine.forward(row, MicroBatching(1))
        parts = {name.removeprefix("micro_0."): (tensor, collected.cuts[name]) for name, tensor in collected.tensors.items()}
        parts.pop("head", None)
        if parallel_state.get_context_parallel_world_size() > 1:
            parts = {}  # a rank has slices of the sequence, in another order
        if parallel_state.get_data_parallel_rank() or (
            parallel_state.get_tensor_model_parallel_rank() and not self.role.model.transformer_config.sequence_parallel
        ):
            parts = {}  # the same as on another rank
        return TrainerOutputs(None if output is None else output[0][0], parts)

    def temperatures(self) -> tuple[float, float]:
        """Return the temperatures by which trainer and engine divide their logits."""
        return self.role.megatron.temperature, self.rollout.engine.sampling.temperature


def _scale(weights: Sequence[Tensor], factor: float) -> None:
    """Multiply weights by a power of two, so that scaling back gives the same bits."""
    for weight in weights:
        if weight.is_floating_point():
            weight.mul_(factor)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the engine's parameters in host memory."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if not name.endswith(DERIVED)
    }


def _build_outputs(generated: Generated, prompt_length: int, collected: _TensorCollector, vocab_size: int) -> EngineOutputs:
    steps = 1 + max(int(name.split(".")[0].removeprefix("token_")) for name in collected.tensors)

    def join_steps(module: str) -> Tensor:
        parts = [collected.tensors.get(f"token_{step}.{module}") for step in range(steps)]
        return torch.cat([part for part in parts if part is not None])

    num_tokens = len(generated.token_ids)
    positions = join_steps("positions")
    positions = positions[0] if positions.dim() > 1 else positions  # of only text all three are equal
    read = torch.full((prompt_length + num_tokens,), -1)
    read[positions] = join_steps("input_ids").to(read.dtype)
    rows = torch.full_like(read, -1)
    rows[positions] = torch.arange(len(positions))
    predicting = rows[prompt_length - 1 : prompt_length - 1 + num_tokens]
    modules = dict.fromkeys(name.split(".", 1)[1] for name in collected.tensors)
    for other in ("input_ids", "positions", "logits"):
        modules.pop(other, None)
    activations = {module: join_steps(module)[predicting] for module in modules}
    logits = join_steps("logits")[-num_tokens:, :vocab_size]
    return EngineOutputs(generated.token_ids, generated.log_probs, tuple(read.tolist()), activations, logits)

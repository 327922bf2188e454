"""Run trainer and rollout engine on the same tokens, layer by layer; `train_vs_rollout.py` puts the ranks' parts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config import Run
from mindspeed_rl.dumps.causes import WeightFinding
from mindspeed_rl.dumps.record import Cut
from mindspeed_rl.dumps.sides import EngineSide, TrainerSide
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.engine.probe import ModelProbe
from mindspeed_rl.resharding.bit_sums import bit_sum
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.rollout.engine_probe import EngineProbe
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import sample_seed
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.roles import Role, build_pass_settings
from mindspeed_rl.workers.rollout_replica import RolloutReplica

#: by how much the weights of the first push are scaled: enough to change every element, and undone to the bit
_SCALE = 2.0


@dataclass
class KeptTensors:
    """A sink that keeps what it is given, in memory.

    Attributes:
        tensors, cuts: by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[str, Cut | None] = field(default_factory=dict)

    def add(self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False) -> None:
        """See `dumps.record.Sink.add`."""
        self.tensors[name] = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None, copy=True)
        self.cuts[name] = cut


class ComparisonWorker(DeviceWorker):
    """One rank's actor and rollout engine, as in training but without an optimizer. All methods are collective."""

    def __init__(self, run: Run, run_id: str, *, rank: int) -> None:
        """Joins the training world, builds the actor and the engine.

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
        self._rest()  # vLLM refuses to start on a device that has less than its share free
        self.rollout = RolloutReplica(run, None, tokenizer, run_id)
        self.vocab_size = plan.model_config.vocab_size
        self.notes: list[str] = []

    # ------------------------------------------------------------------ weights

    def push_twice(self) -> None:
        """The engine holds the trained weights, pushed as in training, after other ones: what does not follow is stale."""
        self.role.offloader.onload(params=True)
        weights = [weight.tensor for weight in self.role.stream.local_weights.values()]
        _scale(weights, _SCALE)
        self._push(0)
        self._before = _copies(self.rollout.engine.get_model())
        _scale(weights, 1.0 / _SCALE)
        self._push(1)
        self._rest()
        self.rollout.engine.restore_cache()

    def _rest(self) -> None:
        """The trainer's weights leave the device where the run file says so."""
        self.role.offloader.offload(params=self.run.generate.offload_train_param)

    def _push(self, version: int) -> None:
        try:
            self.rollout.load(self.role.stream, version)
        except WeightDeliveryError as error:
            self.notes.append(str(error))

    def check_weights(self) -> tuple[list[WeightFinding], list[str]]:
        """Parameters that differ from what the engine's own loader makes of the trained weights; and what was said on the way.

        The engine holds nothing of use afterwards, and its memory is the trainer's.
        """
        engine = self.rollout.engine
        self.role.offloader.onload(params=True)
        pushed = _copies(engine.get_model())
        tensors = self.rollout.tensors_by_parameter()
        engine.load_weights(self.role.stream.named_tensors(self.rollout.dtype), 2)
        found = []
        for name, expected in _copies(engine.get_model()).items():
            held, before = pushed[name], self._before[name]
            differs = held != expected
            if not bool(differs.any()):
                continue
            fault: Any = "other"
            # what the first push brought: the second one did not reach it
            if torch.equal(held, before):
                fault = "stale"
            elif bit_sum(held) == bit_sum(expected):
                fault = "rearranged"
            found.append(WeightFinding(name, tensors.get(name, ()), fault, float(differs.float().mean())))
        if self.rollout.swaps_memory:
            engine.release_memory()
        return found, self.notes

    # ------------------------------------------------------------------ the same tokens

    def generate(self, prompt_ids: Sequence[int], num_tokens: int, number: int) -> EngineSide | None:
        """The engine's response to one prompt with what its model computed; None off the first rank of the first replica."""
        engine, kept = self.rollout.engine, KeptTensors()
        engine.reset_prefix_cache()
        sampling = replace(engine.sampling, max_tokens=min(num_tokens, engine.sampling.max_tokens))

        async def respond() -> Generated:
            return await self.rollout.host.generate(tuple(prompt_ids), sampling, sample_seed(1, number, 0, 0))

        with EngineProbe(engine.get_model(), kept).recording():
            generated = self.rollout.host.run(respond)
        if generated is None or self.rollout.replica:
            return None
        return _engine_side(generated, len(prompt_ids), kept, self.vocab_size)

    def forward(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TrainerSide:
        """The trainer's log-probs of the response and what its model computed."""
        self.role.offloader.onload(params=True)
        row = Rows([torch.tensor([*prompt_ids, *response_ids])], [len(prompt_ids)])
        kept = KeptTensors()
        with ModelProbe(self.role.engine, kept).recording():
            output = self.role.engine.forward(row, MicroBatching(1))
        parts = {name.removeprefix("micro_0."): (tensor, kept.cuts[name]) for name, tensor in kept.tensors.items()}
        parts.pop("head", None)
        if parallel_state.get_context_parallel_world_size() > 1:
            parts = {}  # a rank has slices of the sequence, in another order
        if parallel_state.get_data_parallel_rank() or (
            parallel_state.get_tensor_model_parallel_rank() and not self.role.model.transformer_config.sequence_parallel
        ):
            parts = {}  # the same as on another rank
        return TrainerSide(None if output is None else output[0][0], parts)

    def temperatures(self) -> tuple[float, float]:
        """By which the trainer divides its logits, and by which the engine is asked to."""
        return self.role.engine.temperature, self.rollout.engine.sampling.temperature


def _scale(weights: Sequence[Tensor], factor: float) -> None:
    """A power of two, so that scaling back gives the bits that were there."""
    for weight in weights:
        if weight.is_floating_point():
            weight.mul_(factor)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """The engine's parameters as they are, in host memory."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if not name.endswith(DERIVED)
    }


def _engine_side(generated: Generated, prompt_length: int, kept: KeptTensors, vocab_size: int) -> EngineSide:
    steps = 1 + max(int(name.split(".")[0].removeprefix("token_")) for name in kept.tensors)

    def joined(place: str) -> Tensor:
        found = [kept.tensors.get(f"token_{step}.{place}") for step in range(steps)]
        return torch.cat([part for part in found if part is not None])

    positions = joined("positions")
    positions = positions[0] if positions.dim() > 1 else positions  # of text alone all three are equal
    read = torch.full((prompt_length + len(generated.token_ids),), -1)
    read[positions] = joined("input_ids").to(read.dtype)
    rows = torch.full_like(read, -1)
    rows[positions] = torch.arange(len(positions))
    wanted = rows[prompt_length - 1 : prompt_length - 1 + len(generated.token_ids)]
    places = dict.fromkeys(name.split(".", 1)[1] for name in kept.tensors)
    for other in ("input_ids", "positions", "logits"):
        places.pop(other, None)
    activations = {place: joined(place)[wanted] for place in places}
    logits = joined("logits")[-len(generated.token_ids) :, :vocab_size]
    return EngineSide(generated.token_ids, generated.log_probs, tuple(read.tolist()), activations, logits)

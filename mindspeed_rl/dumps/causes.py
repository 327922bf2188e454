"""Causes of a difference in log-probs between trainer and rollout engine: the evidence, and rules that name a cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed_rl.dumps.record import Cut

_CauseName = Literal[
    "template", "transposed experts", "stale experts", "wrong conversion", "temperature", "router", "precision", "unknown"
]

#: largest difference that rounding explains: of a token's log-prob, and of an activation relative to its largest number
_LOG_PROB_NOISE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "int8": 0.5, "mxfp8": 1.0, "w4a8": 2.0}
_MEAN_NOISE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05, "int8": 0.05, "mxfp8": 0.1, "w4a8": 0.2}
_ACTIVATION_NOISE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1, "int8": 0.1, "mxfp8": 0.2, "w4a8": 0.4}
#: coarsest last
_TYPES = ("float32", "float16", "bfloat16", "int8", "mxfp8", "w4a8")
#: a fitted temperature within this relative distance of the trainer's is the trainer's
_TEMPERATURE_STEP = 5e-3


@dataclass(frozen=True)
class EngineOutputs:
    """Outputs of the engine for one prompt; light, because they travel from the workers to the driver.

    Attributes:
        response: the tokens that it sampled.
        log_probs: log-probs that the engine reported for them.
        read: tokens that its model read, by position; -1 where it read nothing (after the last token, or a cached prefix).
        activations: by module, at the positions that predict the response: [R, hidden].
        logits: [R, vocabulary].
    """

    response: tuple[int, ...]
    log_probs: tuple[float, ...]
    read: tuple[int, ...]
    activations: dict[str, Tensor]
    logits: Tensor


@dataclass(frozen=True)
class TrainerOutputs:
    """Outputs of the trainer for one row on one rank.

    Attributes:
        log_probs: log-probs of the response; None off the last pipeline stage.
        activations: by module, [tokens, 1, hidden], with the part of the tokens that the rank has.
    """

    log_probs: Tensor | None
    activations: dict[str, tuple[Tensor, Cut | None]]


@dataclass(frozen=True)
class WeightFinding:
    """A parameter of the engine that differs from what the engine's own loader makes of the trained weights.

    Attributes:
        parameter: its name in the engine.
        tensors: HF tensors that it is made of.
        fault: it has the values from before the weight sync; the right numbers in other positions; or other numbers.
        share: fraction of its elements that differ.
    """

    parameter: str
    tensors: tuple[str, ...]
    fault: Literal["stale", "rearranged", "other"]
    share: float


@dataclass(frozen=True)
class ActivationGap:
    """The difference between the two after one module of the forward pass.

    Attributes:
        name: "embedding", "layers.3.mlp" ...
        gap: largest difference over the tokens, relative to the largest number there.
        tokens: fraction of the tokens that differ by more than a tenth of the gap.
    """

    name: str
    gap: float
    tokens: float = 1.0


@dataclass(frozen=True)
class Cause:
    """A name out of a short list, and a sentence with the evidence for it."""

    name: _CauseName
    sentence: str

    def __str__(self) -> str:
        return f"{self.name}: {self.sentence}"


@dataclass(frozen=True)
class Evidence:
    """Measurements on the same tokens, with the fields of the command's JSON.

    Attributes:
        num_tokens: sampled tokens that were compared.
        largest_gap, mean_gap: largest and mean gap between the log-probs of trainer and engine.
        trainer_type, engine_type: types in which each computes.
        first_other_token: (position, trainer's token, engine's token) where the two read other tokens, else None.
        weights: parameters of the engine with other numbers than the trainer's weights give.
        places: gaps in the order of the forward pass.
        expert_layers: indexes of the layers with routed experts.
        temperature: the trainer divides its logits by it.
        fitted_temperature: the temperature that turns the engine's logits into the log-probs that it reported, and the
            largest difference left.
        notes: parts that could not be measured.
    """

    num_tokens: int
    largest_gap: float
    mean_gap: float
    trainer_type: str
    engine_type: str
    first_other_token: tuple[int, int, int] | None = None
    weights: tuple[WeightFinding, ...] = ()
    places: tuple[ActivationGap, ...] = ()
    expert_layers: tuple[int, ...] = ()
    temperature: float = 1.0
    fitted_temperature: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    def name_cause(self) -> Cause | None:
        """Return the first cause that the evidence shows; None where the log-probs agree within rounding.

        Earlier causes explain later ones: other tokens or weights make all else differ, so they are checked first.
        """
        if self.first_other_token is not None:
            position, ours, theirs = self.first_other_token
            text = f"first at position {position}: {theirs} where the trainer has {ours}"
            return Cause("template", f"the engine read other tokens than the trainer, {text}")
        if self.weights:
            return _name_weight_cause(self.weights)
        coarser_type = max(self.trainer_type, self.engine_type, key=_TYPES.index)
        # one type on both sides explains its rounding; two types are a cause as soon as they show
        kind = coarser_type if self.trainer_type == self.engine_type else "float32"
        if self.largest_gap <= _LOG_PROB_NOISE[kind] and self.mean_gap <= _MEAN_NOISE[kind]:
            return None
        noise = _ACTIVATION_NOISE[coarser_type]
        # `not <=`, so that NaN counts as a difference
        first = next((place for place in self.places if not place.gap <= noise), None)
        # a temperature acts only on the logits: activations must agree
        if first is None and (cause := _check_temperature(self)):
            return cause
        if first is not None and (layer := _find_layer(first.name, ".mlp")) is not None and layer in self.expert_layers:
            text = (
                f"the weights are equal and so is what enters layer {layer}, but its experts' output is {first.gap:.2g} apart "
                f"on {first.tokens:.0%} of the tokens: other experts are chosen, or their shares are computed otherwise "
                "(top-k, normalisation, scaling, groups)"
            )
            return Cause("router", text)
        if coarser_type != "float32" and (first is None or _grows_slowly(self.places)):
            ends = self.places[:1] + self.places[-1:]
            grows = f", from {ends[0].gap:.2g} at {ends[0].name} to {ends[-1].gap:.2g} at {ends[-1].name}" if ends else ""
            text = (
                f"the trainer computes in {self.trainer_type}, the engine in {self.engine_type}; weights and tokens are "
                f"equal, and the difference adds up layer by layer{grows}"
            )
            return Cause("precision", text)
        if first is not None:
            text = (
                f"the weights under their Hugging Face names are equal, but {first.name} is the first to differ, by "
                f"{first.gap:.2g}"
            )
            what = _name_module_weights(first.name)
            return Cause("wrong conversion", f"{text}: {what} lie otherwise in one of the two, or are used otherwise")
        return Cause("unknown", f"weights, tokens and activations agree, the log-probs are up to {self.largest_gap:.3g} apart")

    def describe(self, cause: Cause | None) -> Iterator[str]:
        """Yield lines for the console: the log-probs, module by module, and the cause."""
        yield (
            f"{self.num_tokens} sampled tokens: log-probs of trainer ({self.trainer_type}) and engine "
            f"({self.engine_type}) are {self.largest_gap:.3g} apart at most, {self.mean_gap:.3g} in the mean"
        )
        for note in self.notes:
            yield f"note: {note}"
        if self.places:
            yield "largest difference of the activations, as a share of their largest number:"
            width = max(len(place.name) for place in self.places)
            yield from (f"  {place.name:<{width}}  {place.gap:.2e}" for place in self.places)
        if cause is None:
            yield "no cause: trainer and engine agree as far as rounding goes"
        else:
            yield f"cause: {cause}"


def _name_weight_cause(weights: Sequence[WeightFinding]) -> Cause:
    experts = [
        weight
        for weight in weights
        if ".experts." in weight.parameter or any(".experts." in tensor for tensor in weight.tensors)
    ]
    faults = {weight.fault for weight in weights}
    if len(experts) == len(weights) and faults == {"rearranged"}:
        return Cause("transposed experts", f"{_list_weights(experts)} hold the right numbers in other places")
    if faults == {"stale"}:
        name: _CauseName = "stale experts" if len(experts) == len(weights) else "wrong conversion"
        return Cause(name, f"{_list_weights(weights)} still hold what they held before the push")
    ends = (".gate.weight", ".router.weight", ".e_score_correction_bias")
    if all(weight.parameter.endswith(ends) for weight in weights):
        return Cause("router", f"{_list_weights(weights)} differ from the trained ones")
    others = [weight for weight in weights if weight.fault != "stale"]
    text = f"{_list_weights(others)} differ from the trained ones in {others[0].share:.0%} of the first"
    return Cause("wrong conversion", text)


def _list_weights(weights: Sequence[WeightFinding]) -> str:
    first = weights[0]
    tensors = ", ".join(first.tensors[:3]) + (f" and {len(first.tensors) - 3} more" if len(first.tensors) > 3 else "")
    more = f" and {len(weights) - 1} more parameters" if len(weights) > 1 else ""
    return f"{first.parameter} (of {tensors}){more}"


def _check_temperature(evidence: Evidence) -> Cause | None:
    """Return the cause if the fitted temperature differs from the trainer's and explains the gap."""
    if evidence.fitted_temperature is None:
        return None
    fitted, left = evidence.fitted_temperature
    # a fit that leaves much of the gap explains nothing
    if abs(fitted / evidence.temperature - 1.0) <= _TEMPERATURE_STEP or left > 0.1 * evidence.largest_gap:
        return None
    text = f"the engine's log-probs fit temperature {fitted:.4g}, the trainer divides its logits by {evidence.temperature:g}"
    return Cause("temperature", text)


def _find_layer(name: str, end: str) -> int | None:
    """Return the index of the layer that this module ends, or None."""
    parts = name.split(".")
    return int(parts[1]) if name.startswith("layers.") and name.endswith(end) else None


def _grows_slowly(places: Sequence[ActivationGap]) -> bool:
    """Return True where no gap is far beyond those before it: rounding adds up, a wrong layer is a step."""
    largest = 0.0
    for place in places:
        if largest and place.gap > 30.0 * largest:
            return False
        largest = max(largest, place.gap)
    return True


def _name_module_weights(name: str) -> str:
    if (layer := _find_layer(name, ".attention")) is not None:
        return (
            f"model.layers.{layer}.input_layernorm and the weights of model.layers.{layer}.self_attn (or its rotary embedding)"
        )
    if (layer := _find_layer(name, ".mlp")) is not None:
        return f"model.layers.{layer}.post_attention_layernorm and the weights of model.layers.{layer}.mlp"
    return f"the weights of {name}"

"""Why trainer and rollout disagree about log-probs: what was measured, and the rules that name a cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

CauseName = Literal[
    "template", "transposed experts", "stale experts", "wrong conversion", "temperature", "router", "precision", "unknown"
]
WeightFault = Literal["stale", "rearranged", "other"]

#: largest difference of a token's log-prob, and of an activation as a share of its largest number, that rounding explains
_LOG_PROB_NOISE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
_MEAN_NOISE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
_ACTIVATION_NOISE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
#: coarsest last
_TYPES = ("float32", "float16", "bfloat16")
#: a fitted temperature within this share of the trainer's is the trainer's
_TEMPERATURE_STEP = 5e-3


@dataclass(frozen=True)
class WeightFinding:
    """A parameter of the engine that does not hold what the engine's own loader makes of the trained weights.

    Attributes:
        parameter: the engine's name of it.
        tensors: HF tensors that it is made of.
        fault: it holds what it held before the push; the right numbers in other places; or other numbers.
        share: of its elements that differ.
    """

    parameter: str
    tensors: tuple[str, ...]
    fault: WeightFault
    share: float

    @property
    def is_of_experts(self) -> bool:
        """True for weights of routed experts."""
        return ".experts." in self.parameter or any(".experts." in name for name in self.tensors)


@dataclass(frozen=True)
class Place:
    """How far the two are apart at one place of the forward pass.

    Attributes:
        name: "embedding", "layers.3.mlp" ...
        gap: largest difference over the tokens, as a share of the largest number there.
        tokens: share of the tokens that are apart by more than a tenth of the gap.
    """

    name: str
    gap: float
    tokens: float = 1.0


@dataclass(frozen=True)
class Evidence:
    """What was measured on the same tokens.

    Attributes:
        num_tokens: sampled tokens that were compared.
        largest_gap, mean_gap: of the log-probs that trainer and engine give them.
        trainer_type, engine_type: what each computes in.
        first_other_token: (place, trainer's token, engine's token) where the two read other tokens, else None.
        weights: parameters of the engine with other numbers than the trainer's weights give.
        places: in the order of the forward pass.
        expert_layers: numbers of the layers with routed experts.
        temperature: by which the trainer divides its logits.
        fitted_temperature: that turns the engine's own logits into the log-probs that it reported, and what is left over.
        notes: what could not be measured.
    """

    num_tokens: int
    largest_gap: float
    mean_gap: float
    trainer_type: str
    engine_type: str
    first_other_token: tuple[int, int, int] | None = None
    weights: tuple[WeightFinding, ...] = ()
    places: tuple[Place, ...] = ()
    expert_layers: tuple[int, ...] = ()
    temperature: float = 1.0
    fitted_temperature: tuple[float, float] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def coarser_type(self) -> str:
        """Of the two types the one with fewer digits."""
        return max(self.trainer_type, self.engine_type, key=_TYPES.index)

    @property
    def first_place(self) -> Place | None:
        """Where the activations part by more than rounding explains."""
        noise = _ACTIVATION_NOISE[self.coarser_type]
        # `not <=`, so that NaN counts as apart
        return next((place for place in self.places if not place.gap <= noise), None)


@dataclass(frozen=True)
class Cause:
    """A name out of a short list, and the sentence that says what it was seen by."""

    name: CauseName
    sentence: str

    def __str__(self) -> str:
        return f"{self.name}: {self.sentence}"


def name_cause(found: Evidence) -> Cause | None:
    """The first cause that the evidence shows; None where the log-probs agree as far as rounding goes.

    What comes first explains what comes after it: other tokens or weights make all else differ, so they are looked at first.
    """
    if found.first_other_token is not None:
        place, ours, theirs = found.first_other_token
        text = (
            f"the engine read other tokens than the trainer, first at position {place}: {theirs} where the trainer has {ours}"
        )
        return Cause("template", text)
    if found.weights:
        return _of_weights(found.weights)
    if _agrees(found):
        return None
    first = found.first_place
    # a temperature acts on the logits alone: activations must agree
    if first is None and (cause := _of_temperature(found)):
        return cause
    if first is not None and (layer := _layer(first.name, ".mlp")) is not None and layer in found.expert_layers:
        text = (
            f"the weights are equal and so is what enters layer {layer}, but its experts' output is {first.gap:.2g} apart on "
            f"{first.tokens:.0%} of the tokens: other experts are chosen, or their shares are computed otherwise (top-k, "
            "normalisation, scaling, groups)"
        )
        return Cause("router", text)
    if found.coarser_type != "float32" and (first is None or _grows(found.places)):
        return Cause("precision", _precision(found))
    if first is not None:
        text = (
            f"the weights under their Hugging Face names are equal, but {first.name} is the first to differ, by {first.gap:.2g}"
        )
        what = _module_weights(first.name)
        return Cause("wrong conversion", f"{text}: {what} lie otherwise in one of the two, or are used otherwise")
    return Cause("unknown", f"weights, tokens and activations agree, the log-probs are up to {found.largest_gap:.3g} apart")


def _agrees(found: Evidence) -> bool:
    # one type on both sides is what is to be expected of it; two types are a cause as soon as they show
    kind = found.coarser_type if found.trainer_type == found.engine_type else "float32"
    return found.largest_gap <= _LOG_PROB_NOISE[kind] and found.mean_gap <= _MEAN_NOISE[kind]


def _of_weights(weights: Sequence[WeightFinding]) -> Cause:
    experts = [weight for weight in weights if weight.is_of_experts]
    if experts and len(experts) == len(weights):
        if all(weight.fault == "rearranged" for weight in experts):
            text = f"{_named(experts)} hold the right numbers in other places"
            return Cause("transposed experts", text)
        if all(weight.fault == "stale" for weight in experts):
            return Cause("stale experts", f"{_named(experts)} still hold what they held before the push")
    stale = [weight for weight in weights if weight.fault == "stale"]
    if len(stale) == len(weights):
        return Cause("wrong conversion", f"{_named(weights)} still hold what they held before the push")
    routers = [weight for weight in weights if _is_router(weight)]
    if len(routers) == len(weights):
        return Cause("router", f"{_named(routers)} differ from the trained ones")
    others = [weight for weight in weights if weight.fault != "stale"]
    return Cause("wrong conversion", f"{_named(others)} differ from the trained ones in {others[0].share:.0%} of the first")


def _is_router(weight: WeightFinding) -> bool:
    return weight.parameter.endswith((".gate.weight", ".router.weight", ".e_score_correction_bias"))


def _named(weights: Sequence[WeightFinding]) -> str:
    first = weights[0]
    tensors = ", ".join(first.tensors[:3]) + (f" and {len(first.tensors) - 3} more" if len(first.tensors) > 3 else "")
    rest = f" and {len(weights) - 1} more parameters" if len(weights) > 1 else ""
    return f"{first.parameter} (of {tensors}){rest}"


def _of_temperature(found: Evidence) -> Cause | None:
    if found.fitted_temperature is None:
        return None
    fitted, left = found.fitted_temperature
    # a fit that leaves much of the gap explains nothing
    if abs(fitted / found.temperature - 1.0) <= _TEMPERATURE_STEP or left > 0.1 * found.largest_gap:
        return None
    text = (
        f"the engine's log-probs are those of temperature {fitted:.4g}, the trainer divides its logits by {found.temperature:g}"
    )
    return Cause("temperature", text)


def _layer(name: str, end: str) -> int | None:
    """The number of the layer whose part this is."""
    parts = name.split(".")
    return int(parts[1]) if name.startswith("layers.") and name.endswith(end) else None


def _grows(places: Sequence[Place]) -> bool:
    """True where no place is far beyond what lies before it: rounding adds up, a wrong layer is a step."""
    largest = 0.0
    for place in places:
        if largest and place.gap > 30.0 * largest:
            return False
        largest = max(largest, place.gap)
    return True


def _precision(found: Evidence) -> str:
    gaps = [place.gap for place in found.places]
    grows = f", from {gaps[0]:.2g} at {found.places[0].name} to {gaps[-1]:.2g} at {found.places[-1].name}" if gaps else ""
    return (
        f"the trainer computes in {found.trainer_type}, the engine in {found.engine_type}; weights and tokens are equal, and "
        f"the difference adds up layer by layer{grows}"
    )


def _module_weights(name: str) -> str:
    if (layer := _layer(name, ".attention")) is not None:
        return (
            f"model.layers.{layer}.input_layernorm and the weights of model.layers.{layer}.self_attn (or its rotary embedding)"
        )
    if (layer := _layer(name, ".mlp")) is not None:
        return f"model.layers.{layer}.post_attention_layernorm and the weights of model.layers.{layer}.mlp"
    return f"the weights of {name}"


def report(found: Evidence, cause: Cause | None) -> Iterator[str]:
    """Lines for the console: the log-probs, place by place, and the cause."""
    yield (
        f"{found.num_tokens} sampled tokens: log-probs of trainer ({found.trainer_type}) and engine ({found.engine_type}) are "
        f"{found.largest_gap:.3g} apart at most, {found.mean_gap:.3g} in the mean"
    )
    for note in found.notes:
        yield f"note: {note}"
    if found.places:
        yield "largest difference of the activations, as a share of their largest number:"
        width = max(len(place.name) for place in found.places)
        yield from (f"  {place.name:<{width}}  {place.gap:.2e}" for place in found.places)
    if cause is None:
        yield "no cause: trainer and engine agree as far as rounding goes"
    else:
        yield f"cause: {cause}"

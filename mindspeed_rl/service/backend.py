"""What trains and samples behind a server: its calls and their records, without torch.

A server reads requests, orders them and keeps their results; a `Backend` does the work. Each record is checked once, where it
is made, so that a backend gets only calls that it can do: a `CallError` names the field, the value and what would be right.

Calls of one model are made one after another, in the order of the client; calls of different models may wait together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mindspeed_rl.run.rules.engine_limits import MAX_TEMPERATURE, MIN_TEMPERATURE

Array = npt.NDArray[Any]

#: losses that a backend computes; a custom loss is two calls of the client: `forward_only`, then cross_entropy with weights
LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]

StopReason = Literal["stop", "length"]

_CLIPS = ("clip_low_threshold", "clip_high_threshold")

#: tokens of a pass times the most targets that any of them has: each gets as many columns
_MAX_TARGETS = 1 << 25
#: log-probs of tokens other than the prompt's and the sampled ones in a call; the rollout engine makes an object of each
_MAX_LOG_PROBS = 1 << 22
#: stops of a call, which each new token of each sample is compared with, and characters of one
_MAX_STOPS, _MAX_STOP_LENGTH = 1024, 4096


class CallError(ValueError):
    """A call that its caller has to change; the text is for the caller."""


class BrokenBackendError(RuntimeError):
    """A backend that cannot do anything any more; the server ends, and continues when it is started again.

    Args:
        text: what has happened.
        requests: those of a call that has not ended in time; they may be why.
    """

    def __init__(self, text: str, requests: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.requests = tuple(requests)


#: ids of the requests that a call is made for: set by the task of a request, and by the thread that makes the call
REQUESTS: ContextVar[tuple[str, ...]] = ContextVar("requests", default=())


@dataclass(frozen=True)
class LossForm:
    """Inputs and thresholds of a loss.

    Attributes:
        inputs: arrays that every datum has, one value per target.
        optional: arrays that a datum may have; a threshold's replaces the call's, token by token.
        defaults: thresholds that a call may set, and their values where it does not.
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)


_SAMPLED = ("target_tokens", "logprobs", "advantages")

#: https://tinker-docs.thinkingmachines.ai/tinker/losses has the definitions
LOSSES: Mapping[str, LossForm] = {
    "cross_entropy": LossForm(("target_tokens", "weights")),
    "importance_sampling": LossForm(_SAMPLED),
    "ppo": LossForm(_SAMPLED, _CLIPS, dict(zip(_CLIPS, (0.8, 1.2)))),
    "cispo": LossForm(_SAMPLED, _CLIPS, dict(zip(_CLIPS, (0.0, 4.0)))),
    "dro": LossForm(_SAMPLED, (), {"beta": 0.05}),
    "gspo": LossForm(_SAMPLED, ("sequence_ratio_mask", *_CLIPS), dict(zip(_CLIPS, (0.8, 1.2)))),
}


def _check_number(name: str, value: float, *, below: float = math.inf) -> None:
    if not (math.isfinite(value) and 0.0 <= value < below):
        limit = "a finite number of at least 0" if below == math.inf else f"from 0 to below {below:g}"
        raise CallError(f"{name}: {value} is not {limit}.")


@dataclass(frozen=True)
class AdapterSpec:
    """A low-rank adapter of the base model.

    Attributes:
        rank: rank of its matrices, at most the slot's.
        seed: seed of its first weights; None takes one from the name of the model.
        train_attn: the attention layers have one.
        train_mlp: the MLP layers (experts included) have one.
        train_unembed: the output layer has one.
    """

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise CallError(f"lora_config.rank: {self.rank} is not positive.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise CallError(f"lora_config.seed: {self.seed} does not fit into 64 bits.")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise CallError("lora_config: train_attn, train_mlp and train_unembed are all false; nothing would be trained.")


def drop_seed(spec: AdapterSpec | None) -> AdapterSpec | None:
    """Return the form of an adapter: weights that are loaded replace those that its seed has made."""
    return None if spec is None else replace(spec, seed=None)


@dataclass(frozen=True)
class Capabilities:
    """What a backend offers, for `get_server_capabilities` and for the checks of a server.

    Attributes:
        base_model: name of the base model.
        base_model_folder: its folder, which has the tokenizer.
        vocab_size: ids of tokens are below this.
        max_tokens: longest sequence, prompt and sample together.
        max_rank: largest rank of an adapter.
        num_slots: models that can exist at the same time.
        unembed: adapters of the output layer can be trained.
        full_weights: the one model trains full weights, and has no adapter.
    """

    base_model: str
    base_model_folder: Path
    vocab_size: int
    max_tokens: int
    max_rank: int
    num_slots: int
    unembed: bool
    full_weights: bool


@dataclass(frozen=True)
class Datum:
    """A sequence and the inputs of its loss.

    Attributes:
        tokens: ids of the input; the model predicts `target_tokens[i]` after reading tokens up to `i`.
        inputs: arrays by name: [N], or [N, K] where every position has K targets (cross_entropy only).
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class LossCall:
    """A loss and its thresholds, which are complete: those that the call omits have their defaults."""

    name: LossName
    config: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        form = LOSSES.get(self.name)
        if form is None:
            reason = " It needs records of sampling that this server does not keep." if self.name == "stable_reinforce" else ""
            raise CallError(f"loss_fn: '{self.name}' is not offered; it can be {', '.join(LOSSES)}.{reason}")
        for key, value in self.config.items():
            if key not in form.defaults:
                known = ", ".join(form.defaults) or "no key"
                raise CallError(f"loss_fn_config: '{self.name}' has no '{key}'; it takes {known}.")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise CallError(f"loss_fn_config.{key}: {value!r} is not a number.")
            _check_number(f"loss_fn_config.{key}", value)
        object.__setattr__(self, "config", {**form.defaults, **self.config})
        if _CLIPS[0] in self.config and self.config[_CLIPS[0]] > self.config[_CLIPS[1]]:
            low, high = (self.config[key] for key in _CLIPS)
            raise CallError(f"loss_fn_config: {_CLIPS[0]} {low} is above {_CLIPS[1]} {high}.")


def check_data(data: Sequence[Datum], loss: LossCall, offered: Capabilities) -> None:
    """Raise CallError for the first datum that a pass could not compute; the text names its index and its input."""
    if not data:
        raise CallError("data: a pass needs at least one datum.")
    form = LOSSES[loss.name]
    shapes = [datum.inputs["target_tokens"].shape for datum in data if "target_tokens" in datum.inputs]
    widest, tokens = max((shape[1] for shape in shapes if len(shape) == 2), default=1), sum(len(datum.tokens) for datum in data)
    if tokens * widest > _MAX_TARGETS:
        text = f"{tokens} tokens with room for {widest} targets each, the most that one has, are above {_MAX_TARGETS}"
        raise CallError(f"data: {text}; send fewer at once.")
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        size = len(datum.tokens)
        if not 1 <= size <= offered.max_tokens:
            raise CallError(f"{where}.model_input has {size} tokens; it must have 1 to {offered.max_tokens}.")
        _check_ids(f"{where}.model_input", np.asarray(datum.tokens), offered.vocab_size)
        for name in form.inputs:
            if name not in datum.inputs:
                raise CallError(f"{where}.loss_fn_inputs: '{name}' is missing; {loss.name} needs {', '.join(form.inputs)}.")
        for name, values in datum.inputs.items():
            if name not in form.inputs + form.optional:
                known = ", ".join(form.inputs + form.optional)
                raise CallError(f"{where}.loss_fn_inputs: {loss.name} has no '{name}'; it takes {known}.")
            shape = datum.inputs["target_tokens"].shape
            is_wide = loss.name == "cross_entropy" and values.ndim == 2
            if is_wide and not 1 <= values.shape[1] <= offered.vocab_size:
                text = f"a token has 1 to {offered.vocab_size} targets, as many as the vocabulary has tokens"
                raise CallError(f"{where}.loss_fn_inputs.{name} has shape {values.shape}; {text}.")
            if values.shape[:1] != (size,) or values.ndim != 1 and not is_wide or values.shape != shape:
                expected = f"({size},)" if loss.name != "cross_entropy" else f"({size},) or ({size}, K), the same for all"
                raise CallError(f"{where}.loss_fn_inputs.{name} has shape {values.shape}; expected {expected}.")
            if name == "target_tokens":
                _check_ids(f"{where}.loss_fn_inputs.{name}", values, offered.vocab_size)
            elif not (np.issubdtype(values.dtype, np.number) and np.isfinite(values).all()):
                raise CallError(f"{where}.loss_fn_inputs.{name} has a value that is not a finite number.")
        _check_token_thresholds(where, datum, loss)
    given = {name for datum in data for name in datum.inputs}
    for index, datum in enumerate(data):
        if absent := sorted(given - datum.inputs.keys()):
            text = f"'{absent[0]}' is missing, which others of the data have; give it to all or to none"
            raise CallError(f"data[{index}].loss_fn_inputs: {text}.")


def _check_token_thresholds(where: str, datum: Datum, loss: LossCall) -> None:
    """Check the optional arrays of a datum, whose shapes are sound."""
    marked = datum.inputs.get("sequence_ratio_mask")
    if marked is not None and not marked.any():
        raise CallError(f"{where}.loss_fn_inputs.sequence_ratio_mask marks no token, so that the sequence has no ratio.")
    bounds = [np.asarray(datum.inputs.get(name, loss.config.get(name, 0.0)), np.float64) for name in _CLIPS]
    for name, values in zip(_CLIPS, bounds):
        if (values < 0).any():
            raise CallError(f"{where}.loss_fn_inputs.{name} has a value below 0.")
    low, high = np.broadcast_arrays(*bounds)
    if (wrong := np.flatnonzero(low > high)).size:
        token = int(wrong[0])
        values = f"{low.flat[token]} and {high.flat[token]}"
        raise CallError(f"{where}.loss_fn_inputs: {_CLIPS[0]} is above {_CLIPS[1]} at token {token} ({values}).")


def _check_ids(name: str, ids: Array, vocab_size: int) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise CallError(f"{name}: token ids are integers, not {ids.dtype}.")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise CallError(f"{name}: token id {wrong.flat[0]} is not in the vocabulary of {vocab_size}.")


@dataclass(frozen=True)
class PassCall:
    """A pass of a model: its loss, and the gradient unless it is `forward_only`."""

    model_id: str
    data: Sequence[Datum]
    loss: LossCall
    forward_only: bool = False


def count_tokens(data: object) -> int:
    """Return the tokens of data, of passes, and of lists of them; 0 of anything else."""
    if isinstance(data, Datum):
        return len(data.tokens)
    parts = data.data if isinstance(data, PassCall) else data
    return sum(map(count_tokens, parts)) if isinstance(parts, (list, tuple)) else 0


@dataclass(frozen=True)
class PassResult:
    """Results of a pass.

    Attributes:
        outputs: for each datum `logprobs`, and `elementwise_loss` of a loss of sampled tokens: float32, shaped as its targets.
        metrics: names of the API with how chunks are joined after the colon, such as `loss:sum`.
    """

    outputs: tuple[Mapping[str, npt.NDArray[np.float32]], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AdamParams:
    """AdamW of one step (arXiv:1711.05101); `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_number(f"adam_params.{name}", value, below=1.0 if name.startswith("beta") else math.inf)
        if not self.eps:
            raise CallError(f"adam_params.eps: {self.eps} is not above 0; a matrix without a gradient would become NaN.")


@dataclass(frozen=True)
class SampleCall:
    """Samples of one prompt.

    Attributes:
        prompt: ids of tokens.
        max_tokens: most tokens of a sample; None for as many as the model can.
        num_samples: samples of the prompt.
        seed: seed of the call; sample `i` depends on it and on `i` only. None is a random one.
        temperature: 0 is greedy.
        top_k: -1 or 0 for all tokens.
        top_p: share of the probability that is sampled from.
        ends_at_eos: the model's end tokens end a sample, and are in it; a call with its own stops, or an empty list, has False.
        stop_tokens: ids that end a sample; the id is in the sample.
        stop_strings: texts that end a sample; the tokens up to the text's end are in the sample.
        prompt_log_probs: log-probs of the prompt's tokens are returned.
        top_prompt_log_probs: most probable tokens returned per token of the prompt.
        top_log_probs: most probable tokens returned per sampled token.
        target_log_probs: [len(prompt) - 1, K] ids whose log-probs at the next position are returned; -1 for none.
    """

    prompt: Sequence[int]
    max_tokens: int | None = None
    num_samples: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ends_at_eos: bool = True
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    prompt_log_probs: bool = False
    top_prompt_log_probs: int = 0
    top_log_probs: int = 0
    target_log_probs: Array | None = None

    def check(self, offered: Capabilities) -> None:
        """Raise CallError for a call that this backend cannot do."""
        size, longest = len(self.prompt), offered.max_tokens
        if not 1 <= size < longest:
            raise CallError(f"prompt has {size} tokens; it must have 1 to {longest - 1}, which leaves room for a sampled one.")
        _check_ids("prompt", np.asarray(self.prompt), offered.vocab_size)
        if self.max_tokens is not None and not 0 <= self.max_tokens <= longest - size:
            raise CallError(
                f"sampling_params.max_tokens: {self.max_tokens} is not from 0 to {longest - size}: the prompt has {size} "
                f"tokens, and the model takes {longest}."
            )
        if self.num_samples < 1:
            raise CallError(f"num_samples: {self.num_samples} is not positive.")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            allowed = f"0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise CallError(f"sampling_params.temperature: {self.temperature:g} must be {allowed}.")
        if self.top_k < -1:
            raise CallError(f"sampling_params.top_k: {self.top_k} is not -1, 0 (all tokens) or a number of tokens.")
        if not 0 < self.top_p <= 1:
            raise CallError(f"sampling_params.top_p: {self.top_p} is not above 0 and at most 1.")
        count, longest_text = len(self.stop_tokens) + len(self.stop_strings), max(map(len, self.stop_strings), default=0)
        if count > _MAX_STOPS or longest_text > _MAX_STOP_LENGTH:
            text = f", the longest of {longest_text:,} characters" if self.stop_strings else ""
            found = f"{count:,} {'stop' if count == 1 else 'stops'}{text}"
            allowed = f"at most {_MAX_STOPS:,} stops of {_MAX_STOP_LENGTH:,} characters are allowed"
            raise CallError(f"sampling_params.stop has {found}; {allowed}.")
        if self.stop_tokens:
            _check_ids("sampling_params.stop", np.asarray(self.stop_tokens), offered.vocab_size)
        if "" in self.stop_strings:
            raise CallError("sampling_params.stop: an empty text would end every sample.")
        counts = {"topk_prompt_logprobs": self.top_prompt_log_probs, "topk_sample_logprobs": self.top_log_probs}
        for name, count in counts.items():
            if not 0 <= count <= offered.vocab_size:
                raise CallError(f"{name}: {count} is not from 0 to the size of the vocabulary, {offered.vocab_size}.")
        targets = self.target_log_probs
        if targets is not None:
            if targets.ndim != 2 or targets.shape[0] != size - 1 or targets.shape[1] > offered.vocab_size:
                most = f"K at most {offered.vocab_size}, the size of the vocabulary"
                raise CallError(f"target_prompt_logprobs has shape {targets.shape}; expected ({size - 1}, K), {most}.")
            _check_ids("target_prompt_logprobs", targets[targets != -1], offered.vocab_size)
        # of named tokens the engine returns the whole vocabulary's
        most_tokens, cost = _MAX_LOG_PROBS // offered.vocab_size, "named tokens cost the whole vocabulary per prompt token"
        if targets is not None and size > most_tokens:
            text = f"{cost}: prompts of at most {most_tokens} tokens, and this one has {size}"
            raise CallError(f"target_prompt_logprobs: {text}.")
        of_prompt = size * (self.top_prompt_log_probs if targets is None else offered.vocab_size)
        sampled = self.num_samples * (longest - size if self.max_tokens is None else self.max_tokens) * self.top_log_probs
        if of_prompt + sampled > _MAX_LOG_PROBS:
            text = f"{of_prompt} log-probs of tokens for the prompt and {sampled} for the samples are above {_MAX_LOG_PROBS}"
            advice = "topk_prompt_logprobs, topk_sample_logprobs" if targets is None else f"topk_sample_logprobs; {cost}"
            raise CallError(f"{text}; ask for fewer ({advice}).")


#: most probable tokens of a position and their log-probs, most probable first
TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sample:
    """Tokens of a sample, their log-probs under softmax(logits) at any temperature, as a pass has them, and why it ended."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stop_reason: StopReason
    top_log_probs: tuple[TopTokens, ...] | None = None


@dataclass(frozen=True)
class SampleResult:
    """Samples of a call and what it asked of the prompt.

    Attributes:
        samples: as many as `num_samples`.
        prompt_log_probs: log-probs of each token of the prompt, None for the first.
        top_prompt_log_probs: the same of the most probable tokens.
        target_log_probs: [len(prompt) - 1, K], 0 where the id was -1.
    """

    samples: tuple[Sample, ...]
    prompt_log_probs: tuple[float | None, ...] | None = None
    top_prompt_log_probs: tuple[TopTokens | None, ...] | None = None
    target_log_probs: npt.NDArray[np.float32] | None = None


class SamplingModels(Protocol):
    """Models that sample by steps, with calls that wait together."""

    @property
    def is_sampling(self) -> bool:
        """Return whether calls are being sampled."""
        ...

    def start_sampling(self, sampler: str, call: SampleCall) -> str:
        """Start a call, and return its name."""
        ...

    def step_sampling(self) -> list[tuple[str, SampleResult | Exception]]:
        """Compute a step of all calls; return those that have ended, each with its result or its error."""
        ...


def sample_together(models: SamplingModels, sampler: str, calls: Sequence[SampleCall]) -> list[SampleResult]:
    """Sample all calls together; no other one is being sampled. The error of a call is raised once all have ended."""
    names = [models.start_sampling(sampler, call) for call in calls]
    results: dict[str, SampleResult] = {}
    errors: list[Exception] = []
    while models.is_sampling:
        for name, result in models.step_sampling():
            if isinstance(result, Exception):
                errors.append(result)
            else:
                results[name] = result
    if errors:
        raise errors[0]
    return [results[name] for name in names]


class Backend(Protocol):
    """What trains and samples.

    Every call raises CallError for an unknown model, sampler or folder and for what a record cannot know, before any state
    changes. A call that is cancelled before it began has no effect; one that began ends, and its result is lost.
    """

    def capabilities(self) -> Capabilities:
        """Return what is offered; it does not change."""
        ...

    async def create_model(self, model_id: str, spec: AdapterSpec | None) -> None:
        """Add a model: the base with a new adapter, or (None) the base's full weights.

        Raises:
            CallError: no slot is free, the rank is above the slot's, or the adapter has a layer that cannot be adapted.
        """
        ...

    async def forward_backward(self, model_id: str, data: Sequence[Datum], loss: LossCall, *, forward_only: bool) -> PassResult:
        """Compute a loss, and add its gradient to the gradient of this model's calls since its last step.

        The loss is a sum over tokens. `forward_only` adds no gradient. After an error the gradient is as before the call.
        """
        ...

    async def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """Make a step of AdamW with the sum of gradients, which is empty afterwards.

        Returns:
            The metrics of the step: `grad_norm:mean` before clipping, `step:max`.

        Raises:
            CallError: the norm of the gradient is not finite; the gradient was dropped, and nothing else changed.
        """
        ...

    async def save_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write the model into a new folder, which appears complete or not at all."""
        ...

    async def load_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Read weights, and the state of the optimizer (else it is new), from a folder of `save_state`.

        A model that does not exist is made with the adapter of the folder. Gradients that wait for a step are dropped.
        """
        ...

    def read_spec(self, folder: Path) -> AdapterSpec | None:
        """Return the adapter of a folder of `save_state`; None for full weights. Raises CallError where the folder is none."""
        ...

    async def make_sampler(self, source: str | Path | None) -> str:
        """Return a sampler of the weights that a model (its id) has now, of a folder of `save_state`, or (None) of the base.

        Later steps of the model do not change a sampler.
        """
        ...

    async def sample(self, sampler: str, call: SampleCall) -> SampleResult:
        """Sample from a sampler. Calls of any samplers are computed together; one that is cancelled is aborted."""
        ...

    async def drop_sampler(self, sampler: str) -> None:
        """Free what a sampler needs; its running calls end first."""
        ...

    async def unload(self, model_id: str) -> None:
        """Free the slot of a model, and its state. Samplers that were made of it continue."""
        ...

    async def export_adapter(self, source: str | Path, folder: Path) -> None:
        """Write a model (its id) or a folder of `save_state` as a PEFT folder, or full weights as an HF folder."""
        ...

    async def export_merged(self, model_id: str, folder: Path) -> None:
        """Write a model as a folder that transformers and vLLM load without an adapter."""
        ...

    def watch(self, failed: Callable[[BrokenBackendError], None]) -> None:
        """Call this, from any thread, once nothing works any more.

        Calls that wait then have no result, and new ones are cancelled.
        """
        ...

    async def close(self) -> None:
        """End all work and free the devices."""
        ...

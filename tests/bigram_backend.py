"""A backend of a service in closed form: logits of the next token are a row of a table, chosen by the token before.

With W the table, log p(t | s) = W[s, t] - logsumexp(W[s]), and the gradient of a sum of c_i * log p(t_i | s_i) is
sum of c_i * (onehot(t_i) - softmax(W[s_i])). AdamW is written out. Everything is float64, so that tests compute the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mindspeed_rl.service.backend import (
    AdamParams,
    AdapterSpec,
    BrokenBackendError,
    CallError,
    Capabilities,
    Datum,
    LossCall,
    PassResult,
    Sample,
    SampleCall,
    SampleResult,
)

VOCAB = 16
END = 1


def log_softmax(table: np.ndarray) -> np.ndarray:
    shifted = table - table.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass
class Bigram:
    """Weights, gradient and state of AdamW."""

    spec: AdapterSpec | None
    weights: np.ndarray
    grad: np.ndarray
    first: np.ndarray
    second: np.ndarray
    steps: int = 0

    @classmethod
    def new(cls, spec: AdapterSpec | None) -> Bigram:
        return cls(spec, *(np.zeros((VOCAB, VOCAB)) for _ in range(4)))

    def step(self, params: AdamParams) -> float:
        norm = float(np.sqrt((self.grad**2).sum()))
        if params.grad_clip_norm and norm > params.grad_clip_norm:
            self.grad *= params.grad_clip_norm / norm
        self.steps += 1
        self.first = params.beta1 * self.first + (1 - params.beta1) * self.grad
        self.second = params.beta2 * self.second + (1 - params.beta2) * self.grad**2
        first = self.first / (1 - params.beta1**self.steps)
        second = self.second / (1 - params.beta2**self.steps)
        self.weights = self.weights * (1 - params.learning_rate * params.weight_decay)
        self.weights = self.weights - params.learning_rate * first / (np.sqrt(second) + params.eps)
        self.grad = np.zeros_like(self.grad)
        return norm


class BigramBackend:
    """Implements `mindspeed_rl.service.backend.Backend`.

    Args:
        folder: folder of the base, for clients' tokenizers.
        pause_s: seconds of a call.
    """

    def __init__(
        self, folder: Path, *, num_slots: int = 4, max_tokens: int = 64, pause_s: float = 0.0, full_weights: bool = False
    ) -> None:
        self._offered = Capabilities("bigram", folder, VOCAB, max_tokens, 8, num_slots, True, full_weights)
        self.pause_s, self.models, self._samplers = pause_s, {}, {}
        self.calls: list[str] = []
        #: the next pass and step break off in the middle
        self.breaks = False
        self._number = 0

    def capabilities(self) -> Capabilities:
        return self._offered

    def _find(self, model_id: str) -> Bigram:
        if model_id not in self.models:
            raise CallError(f"there is no model {model_id}.")
        return self.models[model_id]

    async def create_model(self, model_id: str, spec: AdapterSpec | None) -> None:
        if spec is not None and spec.rank > self._offered.max_rank:
            raise CallError(f"lora_config.rank: {spec.rank} is above {self._offered.max_rank}, the slot's.")
        assert model_id not in self.models and len(self.models) < self._offered.num_slots
        self.models[model_id] = Bigram.new(spec)

    async def forward_backward(self, model_id: str, data: Sequence[Datum], loss: LossCall, *, forward_only: bool) -> PassResult:
        model = self._find(model_id)
        self.calls.append(f"{model_id} {'forward' if forward_only else 'pass'} {len(data)}")
        await asyncio.sleep(self.pause_s)
        table = log_softmax(model.weights)
        grad, outputs, total = np.zeros_like(model.grad), [], 0.0
        for datum in data:
            tokens, targets = np.asarray(datum.tokens), datum.inputs["target_tokens"]
            is_wide = targets.ndim == 2
            sources = np.repeat(tokens[:, None], targets.shape[1], 1) if is_wide else tokens
            log_probs = table[sources, targets]
            if loss.name == "cross_entropy":
                slopes = -np.asarray(datum.inputs["weights"], np.float64)
                losses = slopes * log_probs
            elif loss.name == "importance_sampling":
                ratio = np.exp(log_probs - datum.inputs["logprobs"])
                losses = -ratio * datum.inputs["advantages"]
                slopes = losses
            else:
                raise CallError(f"loss_fn: '{loss.name}' is none of this backend.")
            total += float(losses.sum())
            for source, target, slope in zip(sources.ravel(), targets.ravel(), np.broadcast_to(slopes, targets.shape).ravel()):
                grad[source] -= slope * np.exp(table[source])
                grad[source, target] += slope
            outputs.append({"logprobs": log_probs.astype(np.float32)})
        if not forward_only:
            model.grad += grad
        self._break_off()
        return PassResult(tuple(outputs), {"loss:sum": total})

    def _break_off(self) -> None:
        if self.breaks:
            self.breaks = False
            raise RuntimeError("the device has lost its power")

    async def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        self.calls.append(f"{model_id} step")
        await asyncio.sleep(self.pause_s)
        model = self._find(model_id)
        if not np.sqrt((model.grad**2).sum()) < np.finfo(np.float32).max:
            model.grad = np.zeros_like(model.grad)
            raise CallError("optim_step: the norm of the gradient is not finite in float32; the gradient was dropped.")
        norm = model.step(params)
        self._break_off()
        return {"grad_norm:mean": norm, "step:max": float(model.steps)}

    async def save_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        model = self._find(model_id)
        assert not folder.exists()
        folder.mkdir(parents=True)
        arrays = {"weights": model.weights}
        if with_optimizer:
            arrays |= {"first": model.first, "second": model.second, "steps": np.array(model.steps)}
        np.savez(folder / "state.npz", **arrays)
        (folder / "spec.json").write_text(json.dumps(None if model.spec is None else asdict(model.spec)))

    async def load_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        model = Bigram.new(self.read_spec(folder))
        with np.load(folder / "state.npz") as arrays:
            model.weights = arrays["weights"]
            if with_optimizer:
                model.first, model.second, model.steps = arrays["first"], arrays["second"], int(arrays["steps"])
        self.models[model_id] = model

    def read_spec(self, folder: Path) -> AdapterSpec | None:
        values = json.loads((folder / "spec.json").read_text())
        return None if values is None else AdapterSpec(**values)

    async def make_sampler(self, source: str | Path | None) -> str:
        if source is None:
            weights = np.zeros((VOCAB, VOCAB))
        elif isinstance(source, str):
            weights = self._find(source).weights
        else:
            with np.load(source / "state.npz") as arrays:
                weights = arrays["weights"]
        self._number += 1
        self._samplers[f"sampler-{self._number}"] = weights.copy()
        return f"sampler-{self._number}"

    async def sample(self, sampler: str, call: SampleCall) -> SampleResult:
        self.calls.append(f"{sampler} sample {call.num_samples}")
        await asyncio.sleep(self.pause_s)
        table = log_softmax(self._samplers[sampler])
        samples = []
        for index in range(call.num_samples):
            chance = np.random.default_rng(None if call.seed is None else [call.seed & (1 << 63) - 1, index])
            last, tokens, reason = call.prompt[-1], [], "length"
            room = self._offered.max_tokens - len(call.prompt)
            for _ in range(room if call.max_tokens is None else call.max_tokens):
                if call.temperature == 0:
                    last_next = int(table[last].argmax())
                else:
                    weights = np.exp(table[last] / call.temperature)
                    last_next = int(chance.choice(VOCAB, p=weights / weights.sum()))
                tokens.append((last_next, float(table[last, last_next])))
                last = last_next
                if last in call.stop_tokens or (call.ends_at_eos and last == END):
                    reason = "stop"
                    break
            top = None
            if call.top_log_probs:
                sources = [call.prompt[-1], *(token for token, _ in tokens)][:-1]
                top = tuple(self._top(table[source], call.top_log_probs) for source in sources)
            samples.append(Sample(tuple(t for t, _ in tokens), tuple(p for _, p in tokens), reason, top))
        prompt = np.asarray(call.prompt)
        of_prompt = [None, *map(float, table[prompt[:-1], prompt[1:]])]
        top_of_prompt = [None, *(self._top(table[source], call.top_prompt_log_probs) for source in prompt[:-1])]
        targets = None
        if call.target_log_probs is not None:
            targets = table[prompt[:-1, None], np.maximum(call.target_log_probs, 0)] * (call.target_log_probs >= 0)
        return SampleResult(
            tuple(samples),
            tuple(of_prompt) if call.prompt_log_probs else None,
            tuple(top_of_prompt) if call.top_prompt_log_probs else None,
            None if targets is None else targets.astype(np.float32),
        )

    @staticmethod
    def _top(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
        order = np.argsort(-row, kind="stable")[:count]
        return tuple((int(token), float(row[token])) for token in order)

    async def drop_sampler(self, sampler: str) -> None:
        del self._samplers[sampler]

    async def unload(self, model_id: str) -> None:
        self._find(model_id)
        del self.models[model_id]

    async def export_adapter(self, source: str | Path, folder: Path) -> None:
        assert isinstance(source, str)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        np.save(folder / "weights.npy", self._find(source).weights)

    async def export_merged(self, model_id: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        np.save(folder / "merged.npy", self._find(model_id).weights)

    def watch(self, failed: Callable[[BrokenBackendError], None]) -> None:
        """Never called: nothing here breaks."""

    async def close(self) -> None:
        self.models.clear()

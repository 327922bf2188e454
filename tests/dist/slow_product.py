"""Whole runs of reinforcement learning by transformers and torch in float64, one iteration after the other.

Each iteration starts from the weights that the run had; only tokens, and the rows of steps, come from the run. What the run
computed (log-probs of every role, advantages, gradients, metrics, the weights after it) is compared with the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import product_rewards
import tiny_prediction
import torch
import transformers
from product_bounds import (
    MUON_TOLERANCE,
    ROUGH_TOLERANCE,
    ROUNDINGS,
    TOLERANCE,
    InconclusiveError,
    allow_rounding,
    check_gradients,
)
from product_runs import JUDGES_WEIGHT, STOP_TEXTS, STOP_TOKENS, ProductRun
from random_run_jobs import merge_compositions
from random_runs import RandomRun, Row, RowSequence
from safetensors.torch import load_file
from slow_reference import TIE, Margins, SlowModel, SlowRun, Step
from torch import Tensor
from torch.nn import functional

#: by how much the engine's input of a router may differ from the reference's, in the direction that counts, of its norm. A
#: rounding in bfloat16 is up to 2^-9 of a value, one in int8 up to 2^-8 of the largest of a token, which is about three times
#: the usual one; ten of them before a router add up to about 1 % and 3 %, of which an eighth is in one of 64 directions
_MOST_FORCE = {"float32": 1e-4, "bfloat16": 2.0**-8, "int8": 2.0**-6}
#: step of a router's bias where the run file has none (DeepSeek-V3, arXiv:2412.19437, section 4.2)
_BIAS_RATE = 1e-3


class PredictingModel(SlowModel):
    """A model with prediction layers, which transformers has as a model of more layers."""

    def __init__(self, folder: str, temperature: float, margins: Margins, *, detaches: bool) -> None:
        self._plain = tiny_prediction.Predicting.build("mimo")
        self.model = torch.nn.ModuleList([self._plain.model, self._plain.parts]).double().eval()
        self._plain.model.get_input_embeddings().padding_idx = None
        self._temperature, self.margins, self._is_critic = temperature, margins, False
        self.predicted: list[Tensor] = []
        self.gates: list[Any] = []
        self._detaches = detaches
        self.load({name: value.numpy() for name, value in load_file(Path(folder, "model.safetensors")).items()})

    def compute_log_softmax(self, tokens: Tensor) -> Tensor:
        first, self.predicted = self._plain.logits(tokens, detaches=self._detaches)
        return (first / self._temperature).log_softmax(-1)

    def named_parameters(self) -> dict[str, tuple[torch.nn.Parameter, Any]]:
        return {name: (weight, ...) for name, weight in self._plain.named_parameters().items()}

    def named(self, gradients: bool) -> dict[str, np.ndarray]:
        return {name: _swapped(name, value) for name, value in super().named(gradients).items()}

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        super().load({name: _swapped(name, value) for name, value in weights.items()})


def _swapped(name: str, value: np.ndarray) -> np.ndarray:
    """[hidden state; embedding] for [embedding; hidden state]."""
    return np.roll(value, value.shape[1] // 2, 1) if name.endswith("input_proj.weight") else value


class MuonReference:
    """Muon by its formula (Keller Jordan; arXiv:2502.16982) for the matrices between embedding and head, AdamW for the rest."""

    def __init__(self, model: SlowModel, keys: Mapping[str, Any], others: torch.optim.Optimizer) -> None:
        self._keys, self._others = keys, others
        ends = ("embed_tokens.weight", "lm_head.weight")
        self._matrices = {
            name: (weight, part)
            for name, (weight, part) in model.named_parameters().items()
            if weight[part].dim() == 2 and min(weight[part].shape) > 1 and not name.endswith(ends)
        }
        self._momenta: dict[str, Tensor] = {}
        moved = {id(weight) for weight, _ in self._matrices.values()}
        for group in others.param_groups:
            group["params"] = [weight for weight in group["params"] if id(weight) not in moved]

    def zero_grad(self) -> None:
        self._others.zero_grad()
        for weight, _ in self._matrices.values():
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self._others.step()
        lr, decay, beta = (self._keys[name] for name in ("lr", "weight_decay", "muon_momentum"))
        fused: dict[str, list[str]] = {}
        for name in self._matrices:  # gate and up are one matrix of Megatron
            fused.setdefault(re.sub(r"\.(gate|up)_proj\.", ".gate_up.", name), []).append(name)
        for names in fused.values():
            updates = []
            for name in names:
                weight, part = self._matrices[name]
                assert weight.grad is not None
                momentum = self._momenta.setdefault(name, torch.zeros_like(weight[part]))
                momentum.mul_(beta).add_(weight.grad[part], alpha=1 - beta)
                updates.append(momentum)
            update = torch.cat(updates)
            u, s, vt = torch.linalg.svd(update, full_matrices=False)
            s = s / s.square().sum().sqrt().clamp(min=1e-300)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            scale = self._keys["muon_extra_scale_factor"] * math.sqrt(max(update.shape))
            moved = (u * s @ vt * scale).split([len(one) for one in updates])
            for name, one in zip(names, moved):
                weight, part = self._matrices[name]
                weight[part] = (1 - lr * decay) * weight[part] - lr * one


class LoraReference:
    """AdamW for the matrices A and B of W = W_0 + s B A; modules that Megatron has in one share A (arXiv:2106.09685).

    The head of a critic, which is new, trains as a whole.
    """

    def __init__(self, model: SlowModel, keys: Mapping[str, Any]) -> None:
        self._model, self._scale = model, keys["lora_alpha"] / keys["lora_r"]
        self._keys = keys
        self._a: dict[str, torch.nn.Parameter] = {}
        self._b: dict[str, torch.nn.Parameter] = {}
        self._owners: dict[str, str] = {}
        self._heads = [weight for name, weight in model.model.named_parameters() if name == "score.weight"]

    def load(self, adapters: Mapping[str, np.ndarray]) -> None:
        """Take the adapters of the run before an iteration, of which A belongs to several modules where it is the same."""
        is_new = not self._a
        for name, value in adapters.items():
            module, _, kind = name.removesuffix(".weight").rpartition(".")
            tensor = torch.from_numpy(value.copy()).double()
            if not is_new:
                target = self._b[module] if kind == "lora_B" else self._a[self._owners[module]]
                target.data.copy_(tensor)
            elif kind == "lora_B":
                self._b[module] = torch.nn.Parameter(tensor)
            else:
                same = [owner for owner, known in self._a.items() if known.shape == tensor.shape and torch.equal(known, tensor)]
                self._owners[module] = same[0] if same else module
                if not same:
                    self._a[module] = torch.nn.Parameter(tensor)
        if is_new:
            decay = {"params": self.parameters(), "weight_decay": self._keys["weight_decay"]}
            self._adam = torch.optim.AdamW([decay], lr=self._keys["lr"], betas=(0.9, 0.999), eps=self._keys["adam_eps"])
        self._weights = self._model.named_parameters()
        self._base = {module: self._weight(module).detach() - self._delta(module).detach() for module in self._owners}

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self._a.values(), *self._b.values(), *self._heads]

    def _weight(self, module: str) -> Tensor:
        weight, part = self._weights[f"{module}.weight"]
        return weight[part]

    def _delta(self, module: str) -> Tensor:
        return self._scale * self._b[module] @ self._a[self._owners[module]]

    def zero_grad(self) -> None:
        self._adam.zero_grad()
        self._model.model.zero_grad()

    def find_gradients(self) -> None:
        """Gradients of A and B from the weights' gradients."""
        for module in self._owners:
            weight, part = self._weights[f"{module}.weight"]
            assert weight.grad is not None
            (self._delta(module) * weight.grad[part]).sum().backward()

    @torch.no_grad()
    def step(self) -> None:
        self._adam.step()
        for module, base in self._base.items():
            weight, part = self._weights[f"{module}.weight"]
            weight[part] = base + self._delta(module)


@torch.no_grad()
def measure_force(gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    """The least relative change of a router's input with which it chooses the experts, to first order; 0 for its own choice.

    The score of expert i is s_i(h), and its gradient g_i: a change d of h lifts s_i over s_j only where
    |d| >= (s_j - s_i) / |g_j - g_i|. Experts of a group are chosen together, by the sum of their scores and biases.

    Args:
        gate: the router.
        hidden: [tokens, hidden].
        experts: [tokens, 2].
    """
    assert (experts[:, 0] != experts[:, 1]).all(), "a token has one expert twice"
    scores, gradients = functional.linear(hidden, gate.weight), gate.weight.expand(len(hidden), -1, -1)
    given = functional.one_hot(experts, scores.size(-1)).sum(1) > 0
    if (bias := getattr(gate, "e_score_correction_bias", None)) is not None:
        scores = scores.sigmoid()
        gradients = ((scores * (1 - scores))[..., None] * gradients).unflatten(1, (2, 2)).sum(2)
        scores, given = (scores + bias).unflatten(1, (2, 2)).sum(2), given.unflatten(1, (2, 2)).all(2)
        assert given.any(1).all(), "a token has experts of two groups"
    behind = scores[:, None, :] - scores[:, :, None]
    slopes = (gradients[:, None, :] - gradients[:, :, None]).norm(dim=-1).clamp(min=1e-30)
    needed = (behind / slopes).masked_fill(~given[:, :, None] | given[:, None, :], 0.0)
    return needed.amax((1, 2)).clamp(min=0.0) / hidden.norm(dim=-1)


@dataclass
class SlowIteration(SlowRun):
    """An iteration of a whole run.

    Attributes:
        recorded: columns of its rows.
        before: weights of the roles before it, and the adapters.
        is_sampled: the student has sampled its responses, which come from the data otherwise.
        product: the run.
        forces: row -> `measure_force` of the experts that the engine reports.
        by_adapter: the actor with each adapter of its roles, where they have their own.
        choices: experts of each pass over a sequence, [layer][token, 2].
    """

    before: Mapping[str, Any] = field(default_factory=dict)
    recorded: dict[str, list[Any]] = field(default_factory=dict)
    product: ProductRun = field(kw_only=True)
    is_sampled: bool = True
    forces: dict[int, list[Tensor]] = field(default_factory=dict)
    by_adapter: dict[str, SlowModel] = field(default_factory=dict)
    choices: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loaded: set[str] = set()
        super().__post_init__()
        if "judges" in self.product.names:
            names, weights = self.rl["verifier_function"], self.rl["verifier_weight"]
            weights = [*weights, JUDGES_WEIGHT]
            self.rl = self.rl | {"verifier_function": [*names, "judge"], "verifier_weight": weights}
        if self.product.names & {"agents", "roles"}:  # the environment's points are a part of the reward
            names, weights = self.rl["verifier_function"], self.rl["verifier_weight"]
            self.rl = self.rl | {"verifier_function": [*names, "trajectory"], "verifier_weight": [*weights, 1.0]}
        self.rollout = [torch.from_numpy(values.copy()).double() for values in self.recorded["rollout_log_probs"]]
        if not self.is_sampled:  # the policy of the moment takes the engine's place
            self.rollout = self.log_probs
        self.term = self.rl.get("distillation", {"enabled": False})
        if self.term["enabled"]:
            temperature = self.run.keys["generate_config"]["sampling_config"]["temperature"]
            teacher = self._open("teacher", temperature)
            with torch.no_grad():
                self.teachers = [self._read_full(teacher, index) for index in range(len(self.rows))]

    def _open(self, role: str, temperature: float) -> SlowModel:
        if role not in self.models and self.product.model == "predicting":
            detaches = self.training.get("mtp_detach_heads", True)
            self.models[role] = PredictingModel(self.folders[role], temperature, self.margins, detaches=detaches)
        model = super()._open(role, temperature)
        if role in self.before:
            model.load(self.before[role])
        for place, (name, weights) in enumerate(self.before.get("role_adapters", {}).items() if role == "actor" else ()):
            own = f"actor {name}"
            self.folders[own] = self.folders["actor"]
            self.by_adapter[name] = model if place == 0 else super()._open(own, temperature)
            self.by_adapter[name].load(weights)
        return model

    def choose_model(self, model: SlowModel, index: int, place: int) -> SlowModel:
        if not self.by_adapter or model not in self.by_adapter.values():
            return model
        return self.by_adapter[self._name_adapter(index, place)]

    def _name_adapter(self, index: int, place: int) -> str:
        return str(self.rl["role_adapters"][self.rows[index].turns[place][0]])

    def update_actor(self, steps: list[list[int]], groups: list[list[tuple[int, ...]]]) -> list[Step]:
        if not self.by_adapter:
            return super().update_actor(steps, groups)
        results, before = [], (self.actor, self.train, self.sampled)
        try:
            for rows, (name, model) in itertools.product(steps, self.by_adapter.items()):
                # as if the others had not spoken
                own = [
                    torch.tensor(
                        [
                            self._name_adapter(index, place) == name
                            for place, one in enumerate(row.sequences)
                            for _ in one.response
                        ]
                    )
                    for index, row in enumerate(self.rows)
                ]
                self.actor = model
                self.train, self.sampled = ([mask & mine for mask, mine in zip(masks, own)] for masks in before[1:])
                results += super().update_actor([rows], [[tuple(rows)]])
        finally:
            self.actor, self.train, self.sampled = before
        return results

    def _read_full(self, model: SlowModel, index: int) -> Tensor:
        parts = []
        for sequence in self.rows[index].sequences:
            self.read_sequence(model, model.read, [*sequence.prompt, *sequence.response], len(sequence.prompt), None)
            parts.append(model.full)
        return torch.cat(parts)

    def read_sequence(
        self, model: SlowModel, read: Any, ids: Sequence[int], first: int, experts: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Read a sequence by `SlowModel.read`, and note its experts."""
        result = read(ids, first, experts)
        self.choices.append(list(model.chosen))
        return result

    def _policy(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        loss, clipped = super()._policy(ratio, log_probs, advantages, mask)
        return (torch.zeros_like(loss) if "teachers_alone" in self.product.names else loss), clipped

    def metrics(self) -> dict[str, float]:
        # no engine has log-probs of the data's tokens
        of_engine = () if self.is_sampled else ("rollout/log_probs_diff_mean", "rollout/kl")
        return {name: value for name, value in super().metrics().items() if name not in of_engine}

    def list_columns(self, columns: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """What the columns of the run must have."""
        expected = {"advantages": self.advantages, "returns": self.returns}
        expected |= {"scored_mask": self.sampled, "loss_mask": self.train}
        expected |= {"old_log_probs": self.old, "entropies": self.entropies} if "old_log_probs" in columns else {}
        expected |= {"ref_log_probs": self.ref_log_probs} if "ref_log_probs" in columns else {}
        return expected | ({"values": self.values} if self.has_critic else {})

    def extra_terms(self, index: int, mask: Tensor) -> list[tuple[Tensor, float, str]]:
        if not self.term["enabled"]:
            return []
        student, teacher = self.current[mask], self.teachers[index][mask]
        if (count := self.term["topk"]) < teacher.size(-1):
            ranked = teacher.sort(-1, descending=True)
            self.margins.add("tokens of the teacher", ranked.values[:, count - 1] - ranked.values[:, count])
            student, teacher = (values.gather(1, ranked.indices[:, :count]) for values in (student, teacher))
        if self.term["topk_rest"] == "lump":
            student, teacher = (_lump(values) for values in (student, teacher))
        if self.term["topk_rest"] == "renormalize":
            student, teacher = (values.log_softmax(-1) for values in (student, teacher))
        divergence = _diverge(student, teacher, self.term["loss_mode"], self.term["beta"])
        if self.term["topk_rest"] == "drop":
            # of a teacher next to the student it is small; float32 moves it by about 1e-6
            self.margins.add("divergence", 10.0 * divergence if count < self.current.size(-1) else 1.0)
            divergence = divergence.clamp(min=0.0)
        self._add("distillation/divergence", divergence)
        terms = [(divergence, self.term.get("distillation_loss_coef", 1.0), "distillation/loss")]
        if not self.is_sampled:
            chosen = torch.tensor(self.rows[index].response)[mask]
            supervised = -self.current[mask].gather(1, chosen[:, None])[:, 0]
            terms.append((supervised, self.term["supervised_coef"], "distillation/supervised_loss"))
        return terms

    def _read(
        self, model: SlowModel, index: int, *, records: bool = False, plain: bool = False, logits: list[Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `SlowRun._read`; keeps the whole distributions, the experts and the losses of prediction layers."""
        full, chosen, predicted = [], [], []

        def keep(model: SlowModel, read: Any, ids: Sequence[int], first: int, experts: Any = None) -> tuple[Tensor, Tensor]:
            result = self.read_sequence(model, read, ids, first, experts)
            if not model._is_critic:
                full.append(model.full)
            chosen.append(model.chosen)
            if experts and self.replay == "R3" and logits is None:
                for gate, hidden, given, used in zip(model.gates, model.inputs, experts, model.chosen, strict=True):
                    is_given = (given >= 0).all(-1)
                    self.forces.setdefault(index, []).append(measure_force(gate, hidden[is_given], used[is_given]))
            if isinstance(model, PredictingModel):
                predicted.append((torch.tensor(ids), first, list(model.predicted)))
            return result

        used = {id(one): one for one in (model, *self.by_adapter.values())}.values()
        for one in used:
            one.read = functools.partial(keep, one, one.read)  # pyrefly: ignore
        try:
            result = super()._read(model, index, records=records, plain=plain, logits=logits)
        finally:
            for one in used:
                del one.read
        self.current = torch.cat(full) if full else Tensor()
        if logits is not None and model is self.actor:
            self.step_chosen += chosen
            self._add_predictions(index, predicted)
        return result

    def _add_predictions(self, index: int, predicted: list[tuple[Tensor, int, list[Tensor]]]) -> None:
        """Losses of the prediction layers at the tokens of a row that train."""
        start = 0
        for ids, first, layers in predicted:
            mask = self.train[index][start : start + len(ids) - first]
            start += len(ids) - first
            for layer, output in enumerate(layers):
                log_softmax = output.log_softmax(-1)
                for token in range(max(first, layer + 2), len(ids)):
                    if mask[token - first]:
                        self.predictions.append(-log_softmax[token - layer - 2, ids[token]])

    def start_step(self, rows: Sequence[int]) -> None:
        """Before the rows of a step are read."""
        self.step_chosen: list[list[Tensor]] = []
        self.predictions: list[Tensor] = []
        self._step_rows = rows

    def step_loss(self) -> Tensor | float:
        """What the step adds to the loss of the model."""
        if not self.predictions:
            return 0.0
        trained = sum(int(self.train[index].sum()) for index in self._step_rows)
        total = torch.stack(self.predictions).sum()
        self.sums["mtp_loss"][0] += float(total.detach())
        self.sums["mtp_loss"][1] += len(self.predictions)
        return self.training["mtp_loss_scaling_factor"] / self.training["mtp_num_layers"] / max(trained, 1) * total

    def end_step(self) -> None:
        """After the optimizer's step: biases of routers move towards the experts with too few tokens."""
        if not self.actor.biases() or "lora" in self.product.names:  # a frozen router is not balanced
            return
        rate = self.training.get("moe_router_bias_update_rate", _BIAS_RATE)
        for place, gate in enumerate(self.actor.gates):
            counts = torch.bincount(torch.cat([chosen[place].flatten() for chosen in self.step_chosen]), minlength=4).double()
            self.margins.add("bias", (counts - counts.mean()).abs() + 1e-3)
            gate.e_score_correction_bias += (rate * (counts.mean() - counts).sign()).to(gate.e_score_correction_bias.dtype)

    def _optimizer(self, model: SlowModel, group: str) -> Any:
        is_new = group not in self.optimizers
        if self.run.keys[group].get("lora_target_modules"):
            names = [f"actor {name}" for name, one in self.by_adapter.items() if one is model]
            owner = names[0] if names else group.removesuffix("_config")
            optimizer = self.optimizers.setdefault(owner, LoraReference(model, self.run.keys[group]))
            if owner not in self._loaded:
                self._loaded.add(owner)
                optimizer.load(self.before["adapters"][owner])
            return optimizer
        plain = super()._optimizer(model, group)
        keys = self.run.keys[group]
        if is_new and keys.get("optimizer") == "muon":
            self.optimizers[group] = MuonReference(model, keys, plain)
        return self.optimizers[group]

    def _step(self, model: SlowModel, optimizer: Any, loss: Tensor, group: str, *, is_skipped: bool) -> Step:
        if not isinstance(optimizer, LoraReference):
            return super()._step(model, optimizer, loss, group, is_skipped=is_skipped)
        optimizer.zero_grad()
        loss.backward()
        optimizer.find_gradients()
        if is_skipped:
            return Step({}, 0.0, is_skipped=True)
        norm = torch.nn.utils.clip_grad_norm_(optimizer.parameters(), self.run.keys[group]["clip_grad"])
        optimizer.step()
        return Step({}, float(norm))


class _Rounding(torch.autograd.Function):
    """A value in bfloat16, of which the gradient is too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # pyrefly: ignore
        return value.bfloat16().double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyrefly: ignore
        return gradient.bfloat16().double()


def _round_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_round_output(module, inputs, value) for value in output)
    is_number = torch.is_tensor(output) and output.is_floating_point()
    return _Rounding.apply(output) if is_number else output


@dataclass
class RoundedIteration(SlowIteration):
    """The same iteration with the rounding of the run, which shows how far rounding moves its gradients and weights.

    With bf16 it rounds the weights of all models, the output of each module and its gradient; with moments in bfloat16 each
    moment after a step, up or down by chance. Its tokens go to the experts of the exact iteration.

    Attributes:
        exact: that iteration.
        noise: decides which moments are rounded up.
    """

    exact: SlowIteration = field(kw_only=True)
    noise: torch.Generator = field(kw_only=True)

    def _open(self, role: str, temperature: float) -> SlowModel:
        known = set(map(id, self.models.values()))
        model = super()._open(role, temperature)
        if self.training["bf16"]:
            for module in (part for one in self.models.values() if id(one) not in known for part in one.model.modules()):
                module.register_forward_hook(_round_output)
            self._round([model, *self.by_adapter.values()])
        return model

    @torch.no_grad()
    def _round(self, models: Sequence[SlowModel]) -> None:
        for weight in (weight for model in models for weight in model.model.parameters()):
            weight.copy_(weight.bfloat16().double())

    def read_sequence(
        self, model: SlowModel, read: Any, ids: Sequence[int], first: int, experts: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        return super().read_sequence(model, read, ids, first, self.exact.choices[len(self.choices)])

    def start_step(self, rows: Sequence[int]) -> None:
        super().start_step(rows)
        self._unrounded = {}
        if self.training["bf16"]:
            models = [self.actor, *self.by_adapter.values(), *([self.critic] if self.has_critic else [])]
            self._unrounded = {weight: weight.detach().clone() for model in models for weight in model.model.parameters()}
            self._round(models)

    def _step(self, model: SlowModel, optimizer: Any, loss: Tensor, group: str, *, is_skipped: bool) -> Step:
        ran = loss.backward

        def backward() -> None:
            ran()
            with torch.no_grad():  # the step starts from the weights in float32
                for weight, exact in self._unrounded.items():
                    weight.copy_(exact)

        loss.backward = backward  # pyrefly: ignore
        step = super()._step(model, optimizer, loss, group, is_skipped=is_skipped)
        if self.training.get("optimizer_state_dtype") == "bfloat16":
            adam = optimizer._adam if isinstance(optimizer, LoraReference) else optimizer
            for state in adam.state.values():
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    noise = torch.rand(moment.shape, dtype=torch.float64, generator=self.noise)
                    step_size = 2.0 ** (torch.frexp(moment).exponent - 8).double()
                    moment.copy_(torch.floor(moment / step_size + noise) * step_size)
        return step


def _lump(log_probs: Tensor) -> Tensor:
    """One more token with the probability of all others, of which float32 has no less than 1e-7."""
    return torch.cat([log_probs, (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()], -1)


def _diverge(student: Tensor, teacher: Tensor, mode: str, beta: float) -> Tensor:
    """Divergence of each token (GKD, arXiv:2306.13649, equation 3)."""
    q, p = student.exp(), teacher.exp()
    if mode == "reverse_kl_topk":
        return (q * (student - teacher)).sum(-1)
    if mode == "forward_kl_topk":
        return (p * (teacher - student)).sum(-1)
    mixture = (beta * p + (1 - beta) * q).log()
    return (beta * p * (teacher - mixture) + (1 - beta) * q * (student - mixture)).sum(-1)


class Comparison:
    """A run against its reference.

    Attributes:
        notes: what could not be compared, and why.
    """

    def __init__(self, run: ProductRun, folders: Mapping[str, str]) -> None:
        self._run, self._folders = run, dict(folders)
        if "share_backbone" in run.names:  # the reference is the base of the adapters
            self._folders["ref"] = folders["actor"]
        #: bfloat16 has 8 bits: log-probs of a spread model, and gradients, come close and no more
        self._is_rough = bool(run.keys["megatron_training"]["bf16"])
        self._models: dict[str, SlowModel] = {}
        self._optimizers: dict[str, Any] = {}
        self._is_rounded = self._is_rough or "half_moments" in run.names
        self._rounded_models: dict[str, SlowModel] = {}
        self._rounded_optimizers: dict[str, Any] = {}
        self._noise = torch.Generator().manual_seed(run.seed)
        self._trained = False
        self._average: dict[str, np.ndarray] = {}
        self._reference: dict[str, np.ndarray] = {}
        self._has_followed = False  # the reference, the actor
        #: iteration -> the weights after it, by adapter
        self._versions: dict[int, Mapping[str, Mapping[str, np.ndarray]]] = {}
        self.notes: list[str] = []

    def check(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Compare the records of a job (of all ranks), after an earlier job's.

        Raises:
            InconclusiveError: another run of these ingredients is needed.
        """
        records, before = reports[0]["records"], None
        number = reports[0]["start"]
        self._run.played += [pair for report in reports for pair in report["played"]]
        metrics = {line["iteration"]: line for line in reports[0]["metrics"]}
        greedy = list(reports[0]["greedy"])
        for place, record in enumerate(records):
            if "columns" not in record:
                before = record["after"]
                self._check_average(record, before)
                continue
            number += 1
            assert before is not None
            for kind in (name for name in record if "copies" in name):
                self._check_copies([report["records"][place].get(kind, []) for report in reports], number)
            composition = merge_compositions([report["records"][place]["composition"] for report in reports])
            baselines = greedy.pop(0) if greedy else None
            try:
                self._check_iteration(record, before, metrics[number], composition, baselines)
                self._check_average(record, before)
            except AssertionError as error:
                raise AssertionError(f"iteration {number}: {error}") from error
            before = record["after"]
        for number, record in enumerate(records, start=reports[0]["start"]):
            after = record["after"]
            self._versions.setdefault(number, after.get("role_adapters", {"": after["actor"]}))
        self._check_opponents([played for report in reports for played in report["opponents"]])
        for number, record in enumerate(records, start=reports[0]["start"]):
            try:
                self._check_evaluations(record, {} if number == reports[0]["start"] else metrics[number])
            except AssertionError as error:
                raise AssertionError(f"after iteration {number}: {error}") from error

    def check_that_it_shows(self) -> None:
        """Check that something of the run was compared.

        Raises:
            InconclusiveError: no step of the actor had a gradient.
        """
        if not self._trained and not self._run.why_no_update:
            raise InconclusiveError("nothing trains")

    def _check_copies(self, digests: Sequence[Sequence[tuple[Any, str]]], number: int) -> None:
        copies: dict[Any, set[str]] = {}
        for weight, digest in (pair for report in digests for pair in report):
            copies.setdefault(weight, set()).add(digest)
        apart = [weight for weight, found in copies.items() if len(found) > 1]
        assert not apart, f"iteration {number}: copies of a weight differ: {apart}"

    def _check_iteration(
        self,
        record: Mapping[str, Any],
        before: Mapping[str, Any],
        metrics: Mapping[str, float],
        groups: Mapping[str, list[list[tuple[int, ...]]]],
        baselines: list[float] | None,
    ) -> None:
        run, columns = self._run, record["columns"]
        run.check_prompts(columns, int(metrics["iteration"]))
        rows = [_read_row(columns, index, run.version(metrics)) for index in range(len(columns["prompt_ids"]))]
        if "routed_lengths" in columns and "replay_r3" in run.names:
            places = _place_experts(self._folders["actor"], run.keys["megatron_training"])
            rows = [dataclasses.replace(row, routing=_read_experts(columns, index, places)) for index, row in enumerate(rows)]
        if "roles" in run.names:
            rows = [dataclasses.replace(row, turns=tuple(run.score_roles(row, row.reward).items())) for row in rows]
        if "teachers_alone" in run.names:  # whose divergence trains, and no reward
            rows = [dataclasses.replace(row, reward=0.0, turns=tuple((role, 0.0) for role, _ in row.turns)) for row in rows]
        size = run.group_size
        scores = [math.nan] * len(rows) if baselines is None else baselines
        greedy = [None if math.isnan(value) else value for value in scores[::size]]
        as_random = RandomRun(run.seed, run.size, run.model, run.keys, rows, greedy, size)
        common: dict[str, Any] = {
            "before": before,
            "recorded": columns,
            "product": run,
            "is_sampled": run.samples_responses(int(metrics["iteration"])),
        }
        slow = SlowIteration(as_random, self._folders, models=self._models, optimizers=self._optimizers, **common)
        made = [slow]
        if self._is_rounded:
            own: dict[str, Any] = {"models": self._rounded_models, "optimizers": self._rounded_optimizers}
            made.append(RoundedIteration(as_random, self._folders, **own, **common, exact=slow, noise=self._noise))
        rounded = made[-1]
        self._check_rows(slow, columns)
        for each in made:
            each.prepare(has_old="old_log_probs" in columns)
        if slow.margins.smallest < TIE:
            raise InconclusiveError(f"a tie before the update: {slow.margins.where}, {slow.margins.smallest:.1e}")
        moved_columns = rounded.list_columns(columns)
        for name, values in slow.list_columns(columns).items():
            for number, (result, right, moved) in enumerate(zip(columns[name], values, moved_columns[name], strict=True)):
                near = {"rtol": 0.1, "atol": 0.3} if self._is_rough else {"rtol": 5e-4, "atol": 1e-4}
                expected = right.double().numpy()
                hidden = near["atol"] + ROUNDINGS * np.abs(moved.double().numpy() - expected)
                is_near = np.isclose(result, expected, **near).all()
                if self._is_rough and not is_near and np.isclose(result, expected, rtol=near["rtol"], atol=hidden).all():
                    raise InconclusiveError(f"rounding moves {name} of row {number} too far")
                np.testing.assert_allclose(result, expected, **near, err_msg=f"{name} of row {number}")
        if reason := run.why_no_update:
            self.notes.append(reason)
            return
        steps = record["steps"]
        trains = bool(record["update_actor"])
        critic_steps, actor_steps = [], []
        for each in made:
            critic_steps.append(each.update_critic(steps, groups["update_critic"][: len(steps)]) if slow.has_critic else [])
            actor_steps.append(each.update_actor(steps, groups["update_actor"][: len(steps)]) if trains else [])
        if slow.margins.smallest < TIE:
            raise InconclusiveError(f"a tie in the update: {slow.margins.where}, {slow.margins.smallest:.1e}")
        self._trained |= any(not step.is_skipped and step.norm > 1e-4 for step in actor_steps[0])
        if slow.has_critic:
            self._check_steps("critic", record["update_critic"], critic_steps[0], critic_steps[-1])
            self._check_weights("critic", record["after"]["critic"], before["critic"], slow.critic, rounded.critic)
        if trains:
            self._check_steps("actor", record["update_actor"], actor_steps[0], actor_steps[-1])
            self._check_weights("actor", record["after"]["actor"], before["actor"], slow.actor, rounded.actor)
            for name, after in record["after"].get("role_adapters", {}).items():
                models = (one.by_adapter[name] for one in (slow, rounded))
                self._check_weights("actor", after, before["role_adapters"][name], *models)
        self._check_reference(before, record["after"], metrics)
        moved = rounded.metrics()
        if self._is_rough:  # where an optimizer has no gradients to compare, their norm shows what is missing
            for name in {"actor/grad_norm"} & set(slow.metrics()):
                value = slow.metrics()[name]
                limit = ROUGH_TOLERANCE * value + allow_rounding(abs(moved[name] - value), value, value, name)
                assert abs(metrics[name] - value) <= limit, (name, metrics[name], value, moved[name])
            return
        for name, value in slow.metrics().items():
            limit = max(2e-3 * abs(value), 5e-5) + allow_rounding(abs(moved[name] - value), abs(value), 1.0, name)
            name = {"mtp_loss": "actor/mtp_loss"}.get(name, name)
            assert abs(metrics[name] - value) <= limit, (name, metrics[name], value)

    def _check_rows(self, slow: SlowIteration, columns: Mapping[str, Any]) -> None:
        """Rewards follow from the tokens, log-probs of the engine from its weights."""
        for index, row in enumerate(slow.rows):
            if not slow.is_sampled:
                answer = [*map(ord, columns["labels"][index]), 1]
                assert row.response == answer, f"row {index} has {row.response}, and not the data's {answer}"
                assert not columns["rollout_log_probs"][index].any(), f"an engine has log-probs of row {index}"
                self._run.check_reward(row, columns["rewards"][index], columns, index)
                continue
            mask, start = np.array(row.sampled) & (np.array(row.ages) == 0), 0
            difference = np.abs(columns["rollout_log_probs"][index] - slow.log_probs[index].numpy()) * mask
            for place, one in enumerate(row.sequences):
                mine = difference[start : start + len(one.response)]
                start += len(one.response)
                if mine.max(initial=0.0) < self._limit:
                    continue
                is_known = row.routing is not None
                model = slow.choose_model(slow.actor, index, place)
                if not is_known:
                    mine = self._without_ties(mine, model, [*one.prompt, *one.response], len(one.prompt))
                assert (mine < self._limit).all(), f"rollout_log_probs of row {index} differ by {mine.max()}"
            self._run.check_reward(row, columns["rewards"][index], columns, index)
            self._check_end(row)
        self._check_experts(slow)

    def _without_ties(self, distances: np.ndarray, model: SlowModel, ids: list[int], first: int) -> np.ndarray:
        """Differences of log-probs, less `_measure_ties`.

        Raises:
            InconclusiveError: of one that is too large other experts may be the cause, and of much more.
        """
        ties = self._measure_ties(model, ids, first) + np.zeros_like(distances)
        if (ties[distances >= self._limit] > self._limit).any():
            raise InconclusiveError(f"other experts may move log-probs by {ties.max():.2f}")
        return distances - ties

    @torch.no_grad()
    def _measure_ties(self, model: SlowModel, ids: list[int], first: int) -> np.ndarray | float:
        """By how much log-probs move, in all, where routers whose choice is within the engine's rounding choose otherwise."""
        if not model.gates:
            return 0.0
        was, model.margins = model.margins, Margins()
        plain, _ = model.read(ids, first)
        own, inputs, total = list(model.chosen), list(model.inputs), torch.zeros_like(plain)
        pairs = [(0, 1), (2, 3)] if hasattr(model.gates[0], "e_score_correction_bias") else itertools.combinations(range(4), 2)
        for pair, (place, gate) in itertools.product([torch.tensor(pair) for pair in pairs], enumerate(model.gates)):
            forces = measure_force(gate, inputs[place], pair.expand(len(ids), 2))
            for token in ((forces <= self._most_force) & (own[place].sort(1).values != pair).any(1)).nonzero()[:, 0]:
                given = [torch.full_like(experts, -1) for experts in own]
                given[place][token] = pair
                total += (model.read(ids, first, given)[0] - plain).abs()
        model.margins = was
        return total.numpy()

    @property
    def _most_force(self) -> float:
        return _MOST_FORCE["int8" if "quantized" in self._run.names else "bfloat16" if self._is_rough else "float32"]

    def _check_experts(self, slow: SlowIteration) -> None:
        """Experts that the engine reports are those of the reference, but where the engine's rounding chooses others."""
        ages = [max(row.ages, default=0) for row in slow.rows]
        # experts of older weights are those of other routers
        young = [force for index, forces in slow.forces.items() if not ages[index] for force in forces]
        if not young:
            return
        forces = torch.cat(young)
        assert float(forces.max()) <= self._most_force, (
            f"an input of a router is {float(forces.max())} from the experts that the engine reports"
        )
        share = float((forces == 0.0).double().mean())
        assert share >= 0.9, f"{share} of the experts that the engine reports are the reference's"

    def _check_end(self, row: Row) -> None:
        """A text or a token that ends a response is nowhere but at the end of a turn."""
        for sequence in row.sequences:
            for tokens, _ in (stretch for stretch in sequence.stretches if stretch[1]):
                if "stop_tokens" in self._run.names:
                    assert not set(tokens[:-1]) & set(STOP_TOKENS), f"a turn goes on after a stop token: {tokens}"
                if "stop_texts" in self._run.names:
                    text = "".join(map(chr, tokens[:-1]))
                    assert not any(stop in text for stop in STOP_TEXTS), f"a turn goes on after a stop text: {text!r}"

    def _check_reference(self, before: Mapping[str, Any], after: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """The reference follows the actor as far as it is told to, or stays."""
        if "ref" not in after:
            return
        rl = self._run.keys["rl_config"]
        syncs = rl.get("sync_ref_model") and metrics["iteration"] % rl["ref_model_sync_steps"] == 0
        alpha = rl["ref_model_mixup_alpha"] if syncs else 0.0
        if not self._reference:
            self._reference = {name: value.astype(np.float64) for name, value in before["ref"].items()}
        self._has_followed |= bool(alpha)
        for name, value in after["ref"].items():
            if alpha:  # with bf16, a float32 copy of the reference moves, and the weights are this copy, rounded
                self._reference[name] = (1 - alpha) * self._reference[name] + alpha * after["actor"][name]
            expected = self._reference[name]
            half_step = 2.0**-9 * 2.0 ** np.frexp(expected)[1] if self._is_rough and self._has_followed else 0.0
            wrong = np.abs(value - expected) > half_step + 1e-6
            assert not wrong.any(), f"{name} of the reference: {value[wrong]} and not {expected[wrong]}"

    def _check_average(self, record: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """The moving average is d a + (1 - d) w over the weights of all steps; what does not train is as in the model."""
        if "average" not in record["after"]:
            return
        after = record["after"]
        is_lora, decay = bool(after["adapters"]["actor"]), self._run.keys["rl_config"]["ema_decay"]
        last = after["adapters"]["actor"] if is_lora else after["actor"]
        if not self._average:  # it starts from the weights that the run starts from
            self._average = {name: value.astype(np.float64) for name, value in last.items()}
        iterates = [*record.get("iterates", []), last]
        for old, new in itertools.pairwise(iterates):
            if all(np.array_equal(old[name], new[name]) for name in new):  # a step that was left out
                continue
            self._average = {name: decay * value + (1 - decay) * new[name] for name, value in self._average.items()}
        rounding = {"rtol": 2**-7, "atol": 1e-3} if self._is_rough else {"rtol": 1e-5, "atol": 2e-6}
        for name, value in after["moved average"].items():
            expected = last[name] if name.endswith("e_score_correction_bias") else self._average[name]
            np.testing.assert_allclose(value, expected, **rounding, err_msg=f"average of {name}")

    def _check_evaluations(self, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Responses outside of the rollout have log-probs of the weights of that moment, and figures of their tokens."""
        made = record.get("evaluated", [])
        for each in made:
            weights = record["after"]["average" if each.is_average else "actor"]
            for trajectory in each.trajectories:
                self._check_trajectory(trajectory, each.sampling, weights, record["after"].get("role_adapters", {}))
        for prefix, count, is_average in (("eval", 3, False), ("eval_ema", 3, True)):
            sets = [each for each in made if each.sampling.num_samples == 2 and each.is_average == is_average]
            assert len(sets) in (0, 2), f"{len(sets)} sets are evaluated"
            for name, each in zip((prefix, f"{prefix}/other"), sets):
                assert len(each.items) == count and each.sampling.temperature == 0.8
                self._check_figures(name, each.trajectories, metrics)
        for each in (each for each in made if each.sampling.temperature is None):
            rows = [_make_row(trajectory) for trajectory in each.trajectories]
            low = sum(product_rewards.low(row.response) for row in rows) / len(rows)
            # of both functions, and of the environment's points where there are any
            full = 2.5 if self._run.names & {"agents", "roles"} else 1.5
            full += JUDGES_WEIGHT if "judges" in self._run.names else 0.0
            earned = sum(min(self._run.score(row) / full, 1.0) for row in rows) / len(rows)
            if metrics:
                assert math.isclose(metrics["audit/audited"], low, abs_tol=1e-6), (metrics["audit/audited"], low)
                assert math.isclose(metrics["audit/earned"], earned, abs_tol=1e-6), (metrics["audit/earned"], earned)

    def _check_opponents(self, responses: Sequence[Any]) -> None:
        """Responses of opponents have the log-probs of the weights of their version.

        Raises:
            InconclusiveError: there is none.
        """
        if "opponents" not in self._run.names:
            assert not responses
            return
        if not responses:
            raise InconclusiveError("no opponent plays")
        for one in responses:
            version, _, adapter = one.adapter.removeprefix("version_").partition("/")
            versions = self._versions[int(version)]
            weights = versions[adapter] if adapter else next(iter(versions.values()))
            distance = self._compare_log_probs(
                [*one.prompt_ids, *one.token_ids], one.log_probs, one.temperature or 1.0, weights
            )
            assert distance < self._limit, f"log-probs of an opponent, {one.adapter}, differ by {distance}"

    def _compare_log_probs(
        self, ids: list[int], recorded: Sequence[float], temperature: float, weights: Mapping[str, np.ndarray]
    ) -> float:
        """The largest difference of the log-probs of the last tokens from those of weights; 0 near a tie of experts."""
        model, margins = self._models["actor"], Margins()
        model.load(weights)
        was, model._temperature, model.margins = model._temperature, temperature, margins
        try:
            with torch.no_grad():
                log_probs, _ = model.read(ids, len(ids) - len(recorded))
        finally:
            model._temperature = was
        return 0.0 if margins.smallest < TIE else float(np.abs(np.array(recorded) - log_probs.numpy()).max(initial=0.0))

    def _check_figures(self, name: str, trajectories: Sequence[Any], metrics: Mapping[str, float]) -> None:
        rows = [_make_row(trajectory) for trajectory in trajectories]
        right = [product_rewards.even(row.response) >= 1.0 for row in rows]
        passed = [any(pair) for pair in zip(right[::2], right[1::2])]
        expected = {
            "reward": sum(map(self._run.score, rows)) / len(rows),
            "accuracy": sum(right) / len(rows),
            "pass@2": sum(passed) / len(passed),
            "response_length": sum(len(row.response) for row in rows) / len(rows),
        }
        for key, value in expected.items() if metrics else ():
            assert math.isclose(metrics[f"{name}/{key}"], value, rel_tol=1e-6, abs_tol=1e-6), (name, key, metrics, value)

    def _check_trajectory(
        self, trajectory: Any, sampling: Any, weights: Mapping[str, np.ndarray], by_adapter: Mapping[str, Any]
    ) -> None:
        """Log-probs of a response are those of the weights; a greedy one has the most likely tokens."""
        if (model := self._models.get("actor")) is None:
            return
        plain, margins = self._run.keys["generate_config"]["sampling_config"]["temperature"], Margins()
        temperature = plain if sampling.temperature is None else sampling.temperature or 1.0
        model.load(weights)
        was, model._temperature, model.margins = model._temperature, temperature, margins
        try:
            for sequence in trajectory.sequences:
                if by_adapter:
                    model.load(by_adapter[self._run.keys["rl_config"]["role_adapters"][sequence.role]])
                prompt = list(sequence.prompt_ids)
                ids = [*prompt, *(token for segment in sequence.segments for token in segment.token_ids)]
                if len(ids) == len(prompt):
                    continue
                with torch.no_grad():
                    log_probs, _ = model.read(ids, len(prompt))
                if margins.smallest < TIE:
                    continue
                mask = np.array([segment.sampled for segment in sequence.segments for _ in segment.token_ids])
                recorded = np.array([value for segment in sequence.segments for value in segment.log_probs])
                distance = np.abs(recorded - log_probs.numpy()) * mask
                if distance.max(initial=0.0) >= self._limit:
                    distance = self._without_ties(distance, model, ids, len(prompt))
                assert distance.max(initial=0.0) < self._limit, f"log-probs of an evaluation differ by {distance}"
                if sampling.temperature == 0.0 and not self._run.names & {"form", "quantized"} and not self._is_rough:
                    below = (model.full.max(-1).values - log_probs).numpy()[mask].max(initial=0.0)
                    assert below < 1e-3, "a greedy response has another token than the most likely one"
        finally:
            model._temperature = was

    @property
    def _limit(self) -> float:
        """By how much log-probs of the rollout engine may differ: by the rounding of each of its formats."""
        int8 = 0.15 if self._run.keys["generate_config"].get("quantization") else 0.0
        return int8 + (0.3 if self._is_rough else 5e-4)

    def _check_steps(self, name: str, result: Any, expected: list[Step], rounded: list[Step]) -> None:
        """Gradients of all steps; those of `RoundedIteration` are the reference's where the run has no rounding."""
        for number, (gradients, step, moved) in enumerate(zip(result, expected, rounded, strict=True)):
            if gradients is None or step.is_skipped:  # of a distributed optimizer norm and weights show it
                continue
            assert not (set(gradients) ^ set(step.gradients)) - {"lm_head.weight"} - _list_biases(gradients), (name, number)
            where = f"the {name} in step {number}"
            free = self._is_rough and bool(self._models[name].gates) and "replay_r3" not in self._run.names
            check_gradients(gradients, step, moved, is_rough=self._is_rough, where=where, routes_freely=free)

    def _check_weights(self, name: str, after: Any, before: Any, model: SlowModel, rounded: SlowModel) -> None:
        expected, moved_by = model.named(gradients=False), rounded.named(gradients=False)
        tolerance = MUON_TOLERANCE if self._run.keys[f"{name}_config"].get("optimizer") == "muon" else TOLERANCE
        if self._is_rough:
            return  # an update is smaller than a bit of the weights
        moved = np.sqrt(sum(np.square(expected[key] - before[key]).sum() for key in expected if key in before))
        for key, value in after.items():
            if key in expected:
                distance, far = np.linalg.norm(value - expected[key]), np.linalg.norm(moved_by[key] - expected[key])
                own = float(np.linalg.norm(expected[key] - before[key])) if key in before else 0.0
                limit = tolerance * moved + allow_rounding(float(far), own, float(moved), f"weight {key}") + 1e-5
                assert distance <= limit, f"weight {key} of the {name}: {distance} of {moved}; rounding moves it by {far}"
        for key, bias in model.biases().items():
            np.testing.assert_allclose(after[key], bias, atol=1e-6, err_msg=key)


def _list_biases(names: Any) -> set[str]:
    return {name for name in names if name.endswith("e_score_correction_bias")}


def _make_row(trajectory: Any) -> Row:
    """The tokens of a trajectory, for its scores."""
    sequences = [
        RowSequence(
            list(sequence.prompt_ids), [(list(segment.token_ids), bool(segment.sampled)) for segment in sequence.segments]
        )
        for sequence in trajectory.sequences
    ]
    zeros = [0.0] * sum(len(sequence.response) for sequence in sequences)
    return Row(sequences, False, [0] * len(zeros), zeros, zeros, None, {})


def _place_experts(folder: str, training: Mapping[str, Any]) -> list[list[int]]:
    """Layers with experts of each pipeline stage; layers go to the stages in turns, of as many as a virtual stage has."""
    config = transformers.AutoConfig.from_pretrained(folder)
    count, stages = config.num_hidden_layers, training.get("pipeline_model_parallel_size", 1)
    size = training.get("num_layers_per_virtual_pipeline_stage") or count // stages
    dense = {*getattr(config, "mlp_only_layers", ()), *range(getattr(config, "first_k_dense_replace", 0))}
    return [
        [layer for layer in range(count) if layer // size % stages == stage and layer not in dense] for stage in range(stages)
    ]


def _read_experts(columns: Mapping[str, Any], index: int, places: Sequence[Sequence[int]]) -> list[Any]:
    """Experts of the tokens of each sequence of a row, [token but the last][layer][expert]; -1 where the engine has none."""
    routed, lengths = columns["routed_lengths"][index].tolist(), columns["sequence_lengths"][index].tolist()
    results = [
        np.full((prompt + response - 1, 1 + max(itertools.chain(*places)), 2), -1)
        for prompt, response in zip(lengths[::2], lengths[1::2])
    ]
    for stage, layers in enumerate(places):
        experts = columns[f"routed_experts_{stage}"][index].reshape(sum(routed), len(layers), 2)
        for result, mine in zip(results, np.split(experts, np.cumsum(routed)[:-1]), strict=True):
            result[: len(mine), layers] = mine
    return [result.tolist() for result in results]


def _read_row(columns: Mapping[str, Any], index: int, version: int) -> Row:
    """A row of the data plane."""
    ids, lengths = columns["input_ids"][index].tolist(), columns["sequence_lengths"][index].tolist()
    mask, sequences, start, place = columns["response_mask"][index].tolist(), [], 0, 0
    for prompt, response in zip(lengths[::2], lengths[1::2]):
        tokens = ids[start + prompt : start + prompt + response]
        stretches: list[tuple[list[int], bool]] = []
        for token, sampled in zip(tokens, mask[place : place + response]):
            if not stretches or stretches[-1][1] != sampled:
                stretches.append(([], bool(sampled)))
            stretches[-1][0].append(token)
        sequences.append(RowSequence(ids[start : start + prompt], stretches))
        start, place = start + prompt + response, place + response
    versions = columns["weight_versions"][index].tolist()
    result = columns["reward_results"][index]
    reward = float(columns["rewards"][index])
    zeros = [0.0] * len(mask)
    return Row(
        sequences,
        truncated=bool(columns["truncated"][index]),
        ages=[version - one if one >= 0 else 0 for one in versions],
        rollout_noise=zeros,
        drift=zeros,
        reward=None if math.isnan(reward) else reward,
        parts={"trajectory": None, **result.parts},
    )


transformers.logging.set_verbosity_error()

"""One iteration of reinforcement learning by transformers and torch in float64: a row at a time, nothing packed or shared.

Written from the papers and docs/algorithms.md, without the package's code; only the tokens of a row, the rows of each step and,
where experts are balanced over a micro-batch, its rows come from the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from random_runs import RandomRun, Row
from torch import Tensor
from torch.nn import functional

_NUM_EXPERTS, _TOPK = 4, 2
#: a choice whose two sides are closer than this may fall otherwise in float32
TIE = 2e-5

Experts = list[Tensor]


@dataclass
class Margins:
    """How close the choices of a run are to a tie; such a run shows nothing."""

    smallest: float = math.inf
    where: str = ""

    def add(self, where: str, values: Tensor | float) -> None:
        values = torch.as_tensor(values, dtype=torch.float64).detach().abs().flatten()
        if len(values) and float(values.min()) < self.smallest:
            self.smallest, self.where = float(values.min()), where


class SlowModel:
    """A model of transformers in float64 that computes one sequence at a time.

    Attributes:
        logits: of the router of each layer with experts in the last pass, [tokens, experts].
        chosen: its experts, [tokens, 2].
        inputs: what it chose from, [tokens, hidden].
        full: log-probs of the whole vocabulary in the last pass, [tokens of the response, vocabulary].
    """

    full: Tensor

    def __init__(
        self, folder: str, temperature: float, margins: Margins, *, is_critic: bool = False, trusts_code: bool = False
    ) -> None:
        kind = transformers.AutoModelForSequenceClassification if is_critic else transformers.AutoModelForCausalLM
        plain: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
        if trusts_code:
            plain = {"trust_remote_code": True}
        self.model = kind.from_pretrained(folder, dtype=torch.float32, **plain).double().eval()
        # transformers gives the token of the padding no gradient, though a model may sample it
        self.model.get_input_embeddings().padding_idx = None
        self._temperature, self.margins, self._is_critic = temperature, margins, is_critic
        self.logits: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self._given: list[Tensor] = []
        self.gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(getattr(layer, "mlp", None), "gate")]
        choose = {"Qwen3MoeTopKRouter": self._choose_by_softmax, "DeepseekV3TopkRouter": self._choose_by_sigmoid}
        for place, gate in enumerate(self.gates):
            if type(gate).__name__ in choose:
                gate.forward = self._gate(place, gate, choose[type(gate).__name__])

    def _gate(self, place: int, gate: torch.nn.Module, choose: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = functional.linear(hidden.reshape(-1, hidden.size(-1)), gate.weight)
            self.logits.append(logits)
            self.inputs.append(hidden.detach().reshape(-1, hidden.size(-1)))
            scores, chosen, margins = choose(gate, logits)
            if self._given:
                is_free = (self._given[place] < 0).any(-1)
                chosen, margins = torch.where(is_free[:, None], chosen, self._given[place]), margins[is_free]
            self.margins.add("experts", margins)
            self.chosen.append(chosen)
            weights = scores.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True) * getattr(gate, "routed_scaling_factor", 1.0), chosen

        return forward

    def _choose_by_softmax(self, gate: torch.nn.Module, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ranked = logits.sort(-1, descending=True)
        return logits.softmax(-1), ranked.indices[:, :_TOPK], _measure_margins(logits)

    def _choose_by_sigmoid(self, gate: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best group by the sum of its two best scores, and all of its two experts."""
        assert (gate.num_group, gate.topk_group, gate.num_experts, gate.top_k) == (2, 1, 4, 2)
        scores = logits.sigmoid()
        groups = (scores + gate.e_score_correction_bias).unflatten(-1, (2, 2)).sum(-1)
        first = 2 * groups.argmax(-1, keepdim=True)
        return scores, torch.cat([first, first + 1], -1), groups[:, 0] - groups[:, 1]

    def compute_log_softmax(self, tokens: Tensor) -> Tensor:
        """[tokens, vocabulary] under the temperature."""
        return (self.model(tokens[None]).logits[0] / self._temperature).log_softmax(-1)

    def read(self, ids: Sequence[int], first: int, experts: Experts | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the tokens from `first` on; the values before them of a critic, twice."""
        self.logits, self.chosen, self.inputs, self._given = [], [], [], experts or []
        tokens = torch.tensor(ids)
        if self._is_critic:
            hidden = self.model.model(tokens[None]).last_hidden_state[0]
            values = self.model.score(hidden)[first - 1 : -1, 0]
            return values, values
        log_softmax = self.full = self.compute_log_softmax(tokens)[first - 1 : -1]
        log_probs = log_softmax.gather(1, tokens[first:, None])[:, 0]
        return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)

    def named_parameters(self) -> dict[str, tuple[torch.nn.Parameter, Any]]:
        """Names of a checkpoint, where experts are separate -> (parameter, its part)."""
        results: dict[str, tuple[torch.nn.Parameter, Any]] = {}
        for name, weight in self.model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                half = weight.size(1) // 2
                for index in range(len(weight)):
                    results[name.replace("gate_up_proj", f"{index}.gate_proj.weight")] = weight, (index, slice(0, half))
                    results[name.replace("gate_up_proj", f"{index}.up_proj.weight")] = weight, (index, slice(half, None))
            elif name.endswith("experts.down_proj"):
                for index in range(len(weight)):
                    results[name.replace("down_proj", f"{index}.down_proj.weight")] = weight, index
            else:
                results[name] = weight, ...
        return results

    def biases(self) -> dict[str, np.ndarray]:
        """Biases of routers, which no gradient moves, by the names of a checkpoint."""
        named = self.model.named_buffers()
        return {name: value.numpy() for name, value in named if name.endswith("e_score_correction_bias")}

    @torch.no_grad()
    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take the weights of a checkpoint."""
        for name, (weight, part) in self.named_parameters().items():
            if name in weights:
                weight[part] = torch.from_numpy(weights[name].copy()).to(weight.dtype)
        buffers = dict(self.model.named_buffers())
        for name in self.biases():
            buffers[name].copy_(torch.from_numpy(weights[name].copy()))

    def named(self, gradients: bool) -> dict[str, np.ndarray]:
        """Weights or gradients by the names of a checkpoint."""
        results = {}
        for name, (weight, part) in self.named_parameters().items():
            value = weight.grad if gradients else weight.detach()
            value = torch.zeros_like(weight) if value is None else value
            results[name] = value[part].clone().numpy()
        return results


@dataclass
class Step:
    """What an optimizer step must show.

    Attributes:
        is_skipped: no token of it trains, so that nothing changes, whatever the gradients are.
    """

    gradients: dict[str, np.ndarray]
    norm: float
    is_skipped: bool = False


@dataclass
class SlowRun:
    """The iteration.

    Attributes:
        sums: name of a metric -> (sum, count).
        models: an earlier iteration's, by role; read from their folders where they are missing.
        optimizers: theirs.
    """

    run: RandomRun
    folders: dict[str, str]
    margins: Margins = field(default_factory=Margins)
    sums: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    models: dict[str, SlowModel] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rl, generate, training = (self.run.keys[f"{name}"] for name in ("rl_config", "generate_config", "megatron_training"))
        temperature = generate["sampling_config"]["temperature"]
        self.rl, self.training = rl, training
        self.actor = self._open("actor", temperature)
        self.replay = rl.get("router_replay", {}).get("mode", "disabled")
        self.in_reward = bool(rl["init_kl_coef"]) and rl["use_kl_in_reward"]
        self.in_loss = bool(rl["init_kl_coef"]) and not rl["use_kl_in_reward"] and training["stage"] == "ray_grpo"
        self.has_critic = training["stage"] == "ray_ppo"
        self.experts: list[list[Experts | None]] = [
            [self._given(row, i) for i in range(len(row.sequences))] for row in self.rows
        ]
        with torch.no_grad():
            passes = [self._read(self.actor, index, records=self._records) for index in range(len(self.rows))]
            self.log_probs, self.entropies = [output for output, _ in passes], [output for _, output in passes]
            if self.in_reward or self.in_loss:
                reference = self._open("ref", temperature)
                self.ref_log_probs = [self._read(reference, index, plain=True)[0] for index in range(len(self.rows))]
            if self.has_critic:
                self.critic = self._open("critic", 1.0)
                self.values = [self._read(self.critic, index)[0] for index in range(len(self.rows))]
        # the columns have float32
        self.rollout = [
            (values + _tensor(row.rollout_noise)).float().double() for values, row in zip(self.log_probs, self.rows)
        ]
        self.old = [values + _tensor(row.drift) for values, row in zip(self.log_probs, self.rows)]

    @property
    def is_recorded(self) -> bool:
        """The old policy is what the rollout engine recorded."""
        return self.rl.get("old_log_probs") == "rollout"

    @property
    def _records(self) -> bool:
        """The first pass finds the experts of all later ones; R3's are in the rows where the run is made up."""
        return self.replay == "R2" or self.replay == "R3" and self.rows[0].routing is None

    def _open(self, role: str, temperature: float) -> SlowModel:
        if role not in self.models:
            trusts = self.training.get("trust_remote_code", False)
            self.models[role] = SlowModel(
                self.folders[role], temperature, self.margins, is_critic=role == "critic", trusts_code=trusts
            )
        self.models[role].margins = self.margins
        return self.models[role]

    @property
    def rows(self) -> list[Row]:
        return self.run.rows

    def _given(self, row: Row, index: int) -> Experts | None:
        """Experts of a sequence by layer with experts; -1 for its last token."""
        if row.routing is None:
            return None
        layers = [place for place, layer in enumerate(self.actor.model.model.layers) if hasattr(layer.mlp, "gate")]
        routing = torch.tensor(row.routing[index])[:, layers]
        padded = torch.cat([routing, torch.full_like(routing[:1], -1)])
        # an engine reports the experts of the tokens before the last sampled one
        return list(padded.unbind(1))

    def _read(
        self, model: SlowModel, index: int, *, records: bool = False, plain: bool = False, logits: list[Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both results of `SlowModel.read` for all response tokens of a row; its routers' logits go to `logits`."""
        results = []
        for place, sequence in enumerate(self.rows[index].sequences):
            experts = None if plain or model is not self.actor else self.experts[index][place]
            used = self.choose_model(model, index, place)
            results.append(used.read([*sequence.prompt, *sequence.response], len(sequence.prompt), experts))
            if records:
                self.experts[index][place] = list(used.chosen)
            if logits is not None:
                logits.append((index, list(used.logits)))
        return torch.cat([output for output, _ in results]), torch.cat([output for _, output in results])

    def choose_model(self, model: SlowModel, index: int, place: int) -> SlowModel:
        """The model that computes a sequence of a row in a pass of this model."""
        return model

    # ------------------------------------------------------------------ advantages

    def prepare(self, has_old: bool) -> None:
        """Advantages, returns and masks of every row."""
        rl, rows = self.rl, self.rows
        if self.is_recorded:
            self.old = self.rollout
        elif not has_old:
            self.old = []
        greedy = [self.run.greedy[index // self.run.group_size] for index in range(len(rows))]
        self.scored = [
            row.reward is not None and (rl["adv_estimator"] != "remax" or greedy[i] is not None) for i, row in enumerate(rows)
        ]
        self.sampled = [torch.tensor(row.sampled) & scored for row, scored in zip(rows, self.scored)]
        kl = [torch.zeros(len(row.response), dtype=torch.float64) for row in rows]
        if self.in_reward:
            kl = [self._kl_value(old - ref) for old, ref in zip(self.old, self.ref_log_probs)]
            for penalty, mask in zip(kl, self.sampled):
                self._add("reward/kl", penalty[mask])
        kl = [self.rl["init_kl_coef"] * penalty if self.in_reward else penalty for penalty in kl]
        compute = self._role_advantages if any(row.turns for row in rows) else self._advantages
        self.advantages, self.returns = compute(kl, greedy)
        self.train = []
        for row, mask in zip(rows, self.sampled):
            limit = rl.get("off_policy_token_limit")
            young = torch.tensor([limit is None or age <= limit for age in row.ages])
            self.train.append(mask & young & (not (rl["overlong_filter"] and row.truncated)))
        self.threshold = None
        if rl["top_entropy_quantile"] < 1:
            pool = torch.cat([entropy[mask] for entropy, mask in zip(self.entropies, self.train)])
            self.threshold = float(np.quantile(pool.numpy(), 1 - rl["top_entropy_quantile"])) if len(pool) else 0.0
            self.margins.add("entropy threshold", pool - self.threshold)

    def _advantages(self, kl: list[Tensor], greedy: list[float | None]) -> tuple[list[Tensor], list[Tensor]]:
        rl, rows, name = self.rl, self.rows, self.rl["adv_estimator"]
        lengths, valid = [len(row.response) for row in rows], self.scored
        score = [0.0 if row.reward is None else row.reward for row in rows]
        total = [s - float(k[m].sum()) for s, k, m in zip(score, kl, self.sampled)]

        def group(index: int) -> list[int]:
            size = self.run.group_size
            return [other for other in range(len(rows)) if other // size == index // size and valid[other]]

        if name in ("group_norm", "rloo", "gdpo", "reinforce_plus_plus_baseline"):
            value = []
            for index in range(len(rows)):
                mine = [total[j] for j in group(index)]
                if not valid[index]:
                    value.append(0.0)
                elif name == "rloo":
                    others = [total[j] for j in group(index) if j != index]
                    value.append(total[index] - np.mean(others) if others else 0.0)
                elif name == "gdpo":
                    value.append(self._components(index, group(index)))
                else:
                    divisor = 1.0
                    if name == "group_norm" and rl["scale_rewards"] == "group":
                        divisor = _std(mine) + rl["adv_epsilon"]
                    if name == "group_norm" and rl["scale_rewards"] == "batch":
                        divisor = _std([t for t, v in zip(total, valid) if v]) + rl["adv_epsilon"]
                    value.append((total[index] - np.mean(mine)) / divisor)
            if name == "gdpo":
                pool = [v for v, is_valid in zip(value, valid) if is_valid]
                value = [(v - np.mean(pool or [0.0])) / (_std(pool) + rl["adv_epsilon"]) for v in value]
            spread = [torch.full((n,), float(v), dtype=torch.float64) for n, v in zip(lengths, value)]
            returns = spread
            if name == "reinforce_plus_plus_baseline" and rl["advantage_whiten"]:
                spread = self._whiten(spread)
            return self._masked(spread), self._masked(spread if name != "reinforce_plus_plus_baseline" else returns)
        results, returns = [], []
        for index in range(len(rows)):
            places = self.sampled[index].nonzero()[:, 0].tolist()
            rewards = {place: -float(kl[index][place]) for place in places}
            if places:
                rewards[places[-1]] += score[index]
            advantage, back = (torch.zeros(lengths[index], dtype=torch.float64) for _ in range(2))
            running = next_value = 0.0
            for place in reversed(places):
                if name == "gae":
                    current = float(self.values[index][place])
                    running = rewards[place] + rl["gamma"] * next_value - current + rl["gamma"] * rl["lam"] * running
                    next_value = current
                    advantage[place], back[place] = running, running + current
                else:
                    running = rewards[place] + rl["gamma"] * running
                    baseline = greedy[index] if name == "remax" else 0.0
                    advantage[place], back[place] = running - (baseline or 0.0), running
            results.append(advantage)
            returns.append(back)
        if name != "remax" and rl["advantage_whiten"]:
            results = self._whiten(results)
        return self._masked(results), self._masked(returns)

    def _role_advantages(self, kl: list[Tensor], greedy: list[float | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Those of each role, by the total less the rewards of the others, against its own appearances in the group."""
        run, sampled, scored = self.run, self.sampled, self.scored
        weight = self.rl.get("trajectory_reward_weight", 1.0)
        totals = [[torch.zeros(len(row.response), dtype=torch.float64) for row in run.rows] for _ in range(2)]
        try:
            for role in sorted({role for row in run.rows for role, _ in row.turns}):
                others = [weight * sum(reward for other, reward in row.turns if other != role) for row in run.rows]
                rows = [
                    replace(row, reward=None if row.reward is None else row.reward - other)
                    for row, other in zip(run.rows, others)
                ]
                owners = [
                    [turn[0] == role for turn, sequence in zip(row.turns, row.sequences) for _ in sequence.response]
                    for row in run.rows
                ]
                self.run = replace(run, rows=rows)
                self.scored = [has_score and any(mine) for has_score, mine in zip(scored, owners)]
                self.sampled = [
                    mask & is_scored & torch.tensor(mine) for mask, is_scored, mine in zip(sampled, self.scored, owners)
                ]
                for total, values in zip(totals, self._advantages(kl, greedy)):
                    for index, value in enumerate(values):
                        total[index] += value * self.sampled[index]
        finally:
            self.run, self.sampled, self.scored = run, sampled, scored
        return totals[0], totals[1]

    def _components(self, index: int, group: list[int]) -> float:
        total = 0.0
        for part, weight in zip(self.rl["verifier_function"], self.rl["verifier_weight"]):
            mine = self.rows[index].parts[part]
            scores = [value for j in group if (value := self.rows[j].parts[part]) is not None]
            if mine is not None:
                total += weight * (mine - np.mean(scores)) / (_std(scores) + self.rl["adv_epsilon"])
        return float(total)

    def _whiten(self, values: list[Tensor]) -> list[Tensor]:
        pool = torch.cat([value[mask] for value, mask in zip(values, self.sampled)])
        return [(value - pool.mean()) / (_std(pool.tolist()) ** 2 + 1e-8) ** 0.5 for value in values] if len(pool) else values

    def _masked(self, values: list[Tensor]) -> list[Tensor]:
        return [value * mask for value, mask in zip(values, self.sampled)]

    # ------------------------------------------------------------------ the loss

    def _kl_value(self, x: Tensor) -> Tensor:
        name, limited = self.rl["kl_penalty"], x
        clamps = self.rl["kl_clamp"] and name in ("k3", "k3+", "low_var_kl")
        if clamps:
            limited = x.clamp(-20, 20)
        value = {"k1": limited, "abs": limited.abs(), "k2": limited.square() / 2}.get(name)
        value = limited.neg().exp() + limited - 1 if value is None else value
        if clamps:
            self.margins.add("KL limit", value - 10)
            value = value.clamp(-10, 10)
        if name == "abs":
            self.margins.add("|x|", x)
        return value

    def _kl(self, x: Tensor, ratio: Tensor) -> Tensor:
        """KL of each token, with its gradient."""
        name, value = self.rl["kl_penalty"], self._kl_value(x)
        if self.rl["use_bias_correction_kl"]:
            if name in ("k1", "abs"):
                return ratio * value
            # the gradient of KL(pi || ref) under the old policy: r x
            return (ratio * value).detach() + ratio.detach() * x.detach() * (x - x.detach())
        if name == "k3+":
            return value.detach() + x.detach() * (x - x.detach())
        return value

    def _policy(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, clipped) of each token."""
        rl, name = self.rl, self.rl["loss_type"]
        low, high = 1 - rl["clip_ratio_low"], 1 + rl["clip_ratio_high"]
        near = [ratio[mask] - high] if name != "sapo" else []
        if name in ("cispo", "cispo_cap"):
            weight = ratio.detach().clamp(max=rl["clip_ratio_high"]) if name == "cispo_cap" else ratio.detach().clamp(low, high)
            near = [ratio[mask] - low, ratio[mask] - high] if name == "cispo" else [ratio[mask] - rl["clip_ratio_high"]]
            self._near("ratio", near)
            return -weight * advantages * log_probs, weight != ratio.detach()
        if name == "sapo":
            tau = torch.where(advantages > 0, rl["tau_pos"], rl["tau_neg"]).double()
            return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages, torch.zeros_like(mask)
        unclipped, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
        near += [ratio[mask] - low]
        if rl["delta"] is not None:
            unclipped = -ratio.clamp(max=rl["delta"]) * advantages
            near += [ratio[mask] - rl["delta"]]
        loss = torch.maximum(unclipped, clipped)
        if rl["clip_ratio_c"] is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -rl["clip_ratio_c"] * advantages), loss)
            near += [ratio[mask] - rl["clip_ratio_c"]]
        self._near("ratio", near)
        # a group without spread has advantages that are 0 but for rounding, of which a float32 run has others
        return loss, (clipped > unclipped) & (advantages.abs() > 1e-12)

    def _near(self, where: str, values: list[Tensor]) -> None:
        for value in values:
            self.margins.add(where, value)

    def _weights(self, difference: Tensor) -> Tensor:
        """Weights of the correction of one row's tokens that train."""
        rl, mode = self.rl, self.rl["rollout_importance_sampling_mode"]
        kinds = {"token": difference.exp(), "sequence": difference.sum().exp(), "geometric": difference.mean().exp()}
        scope, _, action = mode.rpartition("_")
        bounded = kinds["geometric" if scope == "token_geometric" else scope].expand_as(difference)
        weight = kinds["token" if scope == "token_geometric" else scope].expand_as(difference)
        high, low = rl["rollout_importance_sampling_threshold"], rl["rollout_importance_sampling_threshold_min"] or 0.0
        self._near("weight", [bounded - high, bounded - low])
        return weight.clamp(max=high) if action == "truncate" else weight * ((bounded >= low) & (bounded <= high))

    def _row_loss(self, index: int, log_probs: Tensor, entropy: Tensor) -> Tensor:
        """The row's part of the sum, under the loss's divisor."""
        rl, mask = self.rl, self.train[index]
        if not mask.any():
            return log_probs.sum() * 0
        old = self.old[index] if self.old else log_probs.detach()
        drift = (log_probs - old)[mask]
        level = rl["importance_sampling_level"]
        if level == "token":
            ratio = drift.exp()
        elif level == "sequence":
            ratio = drift.mean().exp().expand_as(drift)
        else:
            ratio = drift.mean().detach().exp() * (drift - drift.detach()).exp()
        advantages, mine = self.advantages[index][mask], log_probs[mask]
        everything = torch.ones_like(mask[mask])
        policy, clipped = self._policy(ratio, mine, advantages, everything)
        self._add("actor/pg_clipfrac", clipped.double())
        self._add("actor/ppo_kl", -drift)
        if self.threshold is not None:
            keep = self.entropies[index][mask] >= self.threshold
            policy = policy * keep
            self._add("actor/entropy_kept", keep.double())
        rollout = self.rollout[index][mask]
        if (delta := rl["off_policy_sequence_mask_delta"]) is not None:
            moved, direction = (rollout - mine.detach()).mean(), advantages.mean()
            self._near("sequence mask", [moved - delta, direction[direction != 0]])
            dropped = bool(direction < 0) and bool(moved > delta)
            policy = policy * (not dropped)
            self._add("actor/off_policy_sequences_dropped", torch.tensor([float(dropped)]))
        is_computed = self.old and not self.is_recorded
        difference = (self.old[index][mask] if is_computed else mine.detach()) - rollout
        if rl["rollout_importance_sampling_mode"] is not None:
            weights = self._weights(difference)
            policy = policy * weights
            self._add("rollout/weight_mean", weights)
        self._add("rollout/log_probs_diff_mean", difference.abs())
        self._add("rollout/kl", difference.exp() - 1 - difference)
        terms = [(policy, 1.0, "actor/pg_loss")]
        if self.in_loss:
            kl = self._kl(mine - self.ref_log_probs[index][mask], drift.exp())
            terms.append((kl, rl["init_kl_coef"], "actor/kl_loss"))
            self._add("actor/ref_kl", kl)
        terms.append((entropy[mask], -rl["entropy_coeff"], ""))
        terms += self.extra_terms(index, mask)
        self._add("actor/entropy", entropy[mask])
        total = log_probs.sum() * 0
        for values, factor, name in terms:
            value = values.mean() if rl["loss_type"] in ("grpo", "sapo", "gspo") else values.sum()
            total = total + factor * value
            if name:
                self.sums[name][0] += float(value.detach())
        return total

    def _add(self, name: str, values: Tensor) -> None:
        self.sums[name][0] += float(values.detach().sum())
        self.sums[name][1] += len(values)

    def _count(self, rows: Sequence[int]) -> int:
        rl, kind = self.rl, self.rl["loss_type"]
        sequences = sum(bool(self.sampled[index].any()) for index in rows)
        if kind in ("grpo", "sapo", "gspo"):
            return sequences
        limit = rl.get("max_total_response_length") or self.run.keys["generate_config"]["sampling_config"]["max_tokens"]
        return sequences * limit if kind == "dr_grpo" else sum(int(self.train[index].sum()) for index in rows)

    # ------------------------------------------------------------------ updates

    def update_actor(self, steps: list[list[int]], groups: list[list[tuple[int, ...]]]) -> list[Step]:
        """Make all steps of the actor.

        Args:
            steps: rows of each.
            groups: rows of each micro-batch of each step, over all data-parallel ranks.
        """
        optimizer, results = self._optimizer(self.actor, "actor_config"), []
        for rows, micro_batches in zip(steps, groups):
            assert sorted(row for group in micro_batches for row in group) == sorted(rows)
            count = self._count(rows)
            self.start_step(rows)
            total, logits = torch.zeros((), dtype=torch.float64), list[Any]()
            for index in rows:
                total = total + self._row_loss(index, *self._read(self.actor, index, logits=logits))
            for name in ("actor/pg_loss", "actor/kl_loss", "distillation/loss", "distillation/supervised_loss"):
                if name in self.sums:
                    self.sums[name][1] += count
            loss = total / max(count, 1) + self._router_loss(logits, micro_batches) + self.step_loss()
            results.append(self._step(self.actor, optimizer, loss, "actor_config", is_skipped=count == 0))
            self.end_step()
            if count:
                self.sums["actor/grad_norm"][0] += results[-1].norm
                self.sums["actor/grad_norm"][1] += 1
        return results

    def start_step(self, rows: Sequence[int]) -> None:
        """Called before the rows of a step are read."""

    def extra_terms(self, index: int, mask: Tensor) -> list[tuple[Tensor, float, str]]:
        """Further terms of a row: values of its tokens that train, weight, name of the metric."""
        return []

    def step_loss(self) -> Tensor | float:
        """What the step adds to the loss of its rows."""
        return 0.0

    def end_step(self) -> None:
        """Called after the optimizer's step."""

    def _router_loss(self, logits: list[tuple[int, list[Tensor]]], micro_batches: list[tuple[int, ...]]) -> Tensor:
        """coeff * E/k * sum_i (fraction of the choices x mean probability), and z-loss: means over tokens, or sequences."""
        coeff, z = self.training.get("moe_aux_loss_coeff", 0.0), self.training.get("moe_z_loss_coeff", 0.0)
        loss = torch.zeros((), dtype=torch.float64)
        if not coeff and not z or not logits[0][1]:
            return loss
        tokens = sum(len(layers[0]) for _, layers in logits)
        for layer in range(len(logits[0][1])):
            pools, weights = [layers[layer] for _, layers in logits], [1 / len(logits)] * len(logits)
            loss = loss + z * torch.cat(pools).logsumexp(-1).square().mean()
            if self.training.get("moe_router_load_balancing_type", "aux_loss") == "aux_loss":
                pools = [torch.cat([layers[layer] for row, layers in logits if row in group]) for group in micro_batches]
                weights = [len(pool) / tokens for pool in pools]
            for pool, weight in zip(pools, weights):
                self.margins.add("balanced experts", _measure_margins(pool))
                chosen = functional.one_hot(pool.topk(_TOPK, -1).indices, _NUM_EXPERTS).sum(1).double()
                balance = _NUM_EXPERTS * (chosen.mean(0) / _TOPK * pool.softmax(-1).mean(0)).sum()
                loss = loss + coeff * weight * balance
        return loss

    def update_critic(self, steps: list[list[int]], groups: list[list[tuple[int, ...]]]) -> list[Step]:
        """Make all steps of the critic; for the arguments see `update_actor`."""
        optimizer, results, limit = self._optimizer(self.critic, "critic_config"), [], self.rl["cliprange_value"]
        for rows, micro_batches in zip(steps, groups):
            total, count = torch.zeros((), dtype=torch.float64), sum(int(self.train[index].sum()) for index in rows)
            self.start_step(rows)
            logits: list[Any] = []
            for index in rows:
                mask = self.train[index]
                values = self._read(self.critic, index, logits=logits)[0][mask]
                old, returns = self.values[index][mask], self.returns[index][mask]
                plain, bounded = (values - returns) ** 2, (old + (values - old).clamp(-limit, limit) - returns) ** 2
                outside = (values - old).abs() > limit
                self._near("value", [(values - old).abs() - limit, (plain - bounded)[outside]])
                total = total + 0.5 * torch.maximum(plain, bounded).sum()
                self._add("critic/vf_clipfrac", ((bounded > plain) & outside).double())
            self.sums["critic/vf_loss"][0] += float(total.detach())
            self.sums["critic/vf_loss"][1] += count
            loss = total / max(count, 1) + self._router_loss(logits, micro_batches)
            results.append(self._step(self.critic, optimizer, loss, "critic_config", is_skipped=count == 0))
        return results

    def _optimizer(self, model: SlowModel, group: str) -> torch.optim.Optimizer:
        if group in self.optimizers:
            return self.optimizers[group]
        keys = self.run.keys[group]
        decayed = [p for p in model.model.parameters() if p.dim() > 1]
        others = [p for p in model.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": keys["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        self.optimizers[group] = torch.optim.AdamW(groups, lr=keys["lr"], betas=(0.9, 0.999), eps=keys["adam_eps"])
        return self.optimizers[group]

    def _step(self, model: SlowModel, optimizer: torch.optim.Optimizer, loss: Tensor, group: str, *, is_skipped: bool) -> Step:
        optimizer.zero_grad()
        loss.backward()
        gradients = model.named(gradients=True)
        if is_skipped:
            return Step(gradients, 0.0, is_skipped=True)
        norm = torch.nn.utils.clip_grad_norm_(model.model.parameters(), self.run.keys[group]["clip_grad"])
        optimizer.step()
        return Step(gradients, float(norm))

    def metrics(self) -> dict[str, float]:
        """Metrics over all steps."""
        return {name: value / count for name, (value, count) in self.sums.items() if count}


def _measure_margins(logits: Tensor) -> Tensor:
    """By how much the last expert that is chosen is before the next."""
    ranked = logits.sort(-1, descending=True).values
    return ranked[:, _TOPK - 1] - ranked[:, _TOPK]


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _tensor(values: Sequence[float]) -> Tensor:
    # the columns have float32
    return torch.tensor(values, dtype=torch.float32).double()

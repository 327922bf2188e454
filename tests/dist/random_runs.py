"""Random runs of reinforcement learning: a run file, its responses and their rewards, all from one seed.

Only what `config` accepts is a run: a drawn run file that breaks a rule is drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from megatron_release import GROUPED_EXPERTS
from slow_layouts import EP, MOE_RECOMPUTE, PP, RECOMPUTE, RING, SP, ULYSSES, VPP

from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.models import plan_models
from mindspeed_rl.run.resolve import resolve

Keys = dict[str, Any]

MAX_TOKENS, _CONTEXT = 24, 64
#: added to the seed of a run that is too close to a tie, for another run of the same layout
SEED_OF_ATTEMPT = 1_000_000
#: seed from which on runs have roles, averages and keys that change nothing
_FIRST_WITH_MORE = 100
#: index of the iteration, so that tokens of older weights exist
ITERATION = 4
_ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
_ZERO = {"use_distributed_optimizer": True}
_GROUPED = {"moe_grouped_gemm": GROUPED_EXPERTS}
_FSDP = {"engine": "fsdp"}
_DENSE: dict[int, list[Keys]] = {
    1: [{}, {}, RECOMPUTE, _FSDP],
    2: [{"tensor_model_parallel_size": 2}, SP, SP | RECOMPUTE, PP, VPP, RING, ULYSSES, {}, _ZERO, _FSDP, _FSDP | RECOMPUTE],
    4: [SP | PP, SP | RING, SP | _ZERO, PP | ULYSSES, VPP | _ZERO, RING | {"context_parallel_size": 4}, ULYSSES | _ZERO, _FSDP],
}
_EXPERTS: dict[int, list[Keys]] = {
    1: [{}, _GROUPED, MOE_RECOMPUTE, RECOMPUTE],
    2: [EP, EP | _GROUPED, EP | _ALLGATHER, SP, SP | {"expert_tensor_parallel_size": 1}, PP, VPP, RING, {}],
    4: [PP | EP, SP | EP, SP | PP, SP | EP | {"expert_tensor_parallel_size": 1} | _ZERO, RING | EP, VPP | EP],
}


@dataclass(frozen=True)
class RowSequence:
    """Tokens in one context: the prompt's, then stretches of (tokens, the actor sampled them)."""

    prompt: list[int]
    stretches: list[tuple[list[int], bool]]

    @property
    def response(self) -> list[int]:
        return [token for tokens, _ in self.stretches for token in tokens]

    @property
    def sampled(self) -> list[bool]:
        return [sampled for tokens, sampled in self.stretches for _ in tokens]


@dataclass(frozen=True)
class Row:
    """One response.

    Attributes:
        ages: of each token's weights in versions.
        rollout_noise: log-prob of the rollout engine less the old policy's, of each token.
        drift: added to the trainer's log-prob of the old policy.
        reward: None where scoring failed.
        parts: score of each reward function; None without an opinion.
        routing: experts of each token of each sequence, [layer][expert], where the engine reports them.
        turns: role of each sequence and the reward of its turn, in an episode of several roles.
    """

    sequences: list[RowSequence]
    truncated: bool
    ages: list[int]
    rollout_noise: list[float]
    drift: list[float]
    reward: float | None
    parts: dict[str, float | None]
    routing: list[list[list[list[int]]]] | None = None
    turns: tuple[tuple[str, float], ...] = ()

    @property
    def response(self) -> list[int]:
        return [token for sequence in self.sequences for token in sequence.response]

    @property
    def sampled(self) -> list[bool]:
        return [sampled for sequence in self.sequences for sampled in sequence.sampled]


@dataclass
class RandomRun:
    """A run of one iteration.

    Attributes:
        size: processes of the training world.
        model: name in `tiny_hf.CONFIGS`.
        keys: the run file.
        greedy: reward of the greedy response to each prompt; None where it failed.
    """

    seed: int
    size: int
    model: str
    keys: dict[str, Any]
    rows: list[Row]
    greedy: list[float | None]
    group_size: int
    path: str = field(default="", init=False)

    @property
    def rl(self) -> Keys:
        return self.keys["rl_config"]

    def write(self, folder: Path, folders: dict[str, str]) -> None:
        """Write the run file, with the models of the roles; checks it against all rules."""
        keys = {name: dict(group) if isinstance(group, dict) else group for name, group in self.keys.items()}
        keys["actor_config"]["load"] = folders["actor"]
        if keys["megatron_training"].get("optimizer_offload_path"):
            keys["megatron_training"]["optimizer_offload_path"] = str(folder)
        keys["megatron_training"]["tokenizer_name_or_path"] = folders["actor"]
        if self.rl.get("use_integrated_worker", True):  # the reference has the actor's settings
            del keys["ref_config"]
            keys["rl_config"]["integrated_mode_config"] = {"ref_model_load_path": folders["ref"]}
        else:
            keys["ref_config"]["load"] = folders["ref"]
        if "critic_config" in keys:
            keys["critic_config"]["load"] = folders["critic"]
        path = folder / f"run_{self.seed}.yaml"
        path.write_text(yaml.safe_dump(keys, sort_keys=False))
        self.path = str(path)
        self.resolve()

    def resolve(self) -> Run:
        """Read the run file as `train` does."""
        return plan_models(resolve(load_run_config(self.path), platform="cpu"))


def all_layouts(sizes: Sequence[int], models: Sequence[str]) -> list[tuple[int, str, Keys]]:
    """Processes, model and keys of every layout."""
    tables = {model: _EXPERTS if model == "moe_mixed" else _DENSE for model in models}
    return [(size, model, layout) for size in sizes for model in models for layout in tables[model][size]]


def generate(
    seed: int,
    sizes: Sequence[int],
    folder: Path,
    folders: dict[str, dict[str, str]],
    models: Sequence[str],
    *,
    few_rows: bool = False,
) -> RandomRun:
    """The run of this seed, written to the folder; as many seeds in a row as there are layouts have each of them once.

    Args:
        few_rows: an optimizer step has one row, and data-parallel replicas but one have none.
    """
    generator, layouts = random.Random(seed), all_layouts(sizes, models)
    if few_rows:
        layouts = [layout for layout in layouts if _has_replicas(layout)]
    stride = next(step for step in (17, 19, 23) if len(layouts) % step)
    at = layouts[seed % SEED_OF_ATTEMPT * stride % len(layouts)]
    for _ in range(200):
        run = _generate(generator, seed, *at, few_rows=few_rows)
        try:
            run.write(folder, folders[run.model])
        except ConfigError as error:
            refused = error
            continue
        return run
    raise AssertionError(f"no run of 200 draws is accepted; the last: {refused}")


def _has_replicas(layout: tuple[int, str, Keys]) -> bool:
    size, _, keys = layout
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return size > math.prod(keys.get(name, 1) for name in names)


def _generate(r: random.Random, seed: int, size: int, model: str, layout: Keys, *, few_rows: bool) -> RandomRun:
    has_experts = model == "moe_mixed"
    stage = r.choice(["ray_grpo"] * 3 + ["ray_dapo", "ray_ppo"])
    if has_experts and stage == "ray_ppo":
        stage = "ray_grpo"  # no critic of this model is made
    group_size, num_prompts = r.choice([2, 4]), r.choice([2, 3, 4])  # three: a group is spread over replicas
    replicas = 2 if size > 1 else 1
    micro, mini = r.choice([1, 2, group_size * num_prompts // replicas]), r.choice([num_prompts // 2, num_prompts])
    if few_rows:
        group_size, num_prompts, micro, mini = 1, r.choice([1, 2, 4]), 1, 1
    training: Keys = {
        "stage": stage,
        "bf16": False,
        "seed": r.randrange(1000),
        "global_batch_size": num_prompts,
        "seq_length": _CONTEXT,
        "train_iters": 10,
        "data_path": "prompts.jsonl",
        "micro_batch_size": micro,
        "loss_chunk_size": r.choice([3, 16, 1024]),
        "dataset_additional_keys": ["labels"],
        "check_weight_copies_interval": seed % 2,
        **layout,
    }
    balancing: Keys = {"moe_aux_loss_coeff": r.choice([0.0, 0.0, 0.3])}
    if has_experts:
        if r.random() < 0.4:
            balancing["moe_router_load_balancing_type"] = "seq_aux_loss"
        if r.random() < 0.3:
            balancing["moe_z_loss_coeff"] = 0.02
        training |= balancing
    optimizer = {
        "lr": 0.3,
        "lr_decay_style": "constant",
        "adam_eps": 1.0,  # an update is then smooth in the gradient
        "weight_decay": r.choice([0.0, 0.01]),
        "clip_grad": r.choice([0.3, 1.0, 1e9]),
        "finetune": True,
    }
    rl = _choose_objective(r, stage) | {
        "actor_resource": {"num_npus": size},
        "n_samples_per_prompt": group_size,
        "mini_batch_size": mini,
        "epochs": r.choice([1, 1, 2]),
        "max_prompt_length": 32,
        "rule_reward": True,
        "use_remove_padding": r.random() < 0.75,
        "use_prefix_grouper": "context_parallel_size" not in layout and r.random() < 0.5,
        "use_dynamic_bsz": r.random() < 0.35,
        "max_packing_token_size": r.choice([64, 96, 200]),
        "shuffle_mini_batch": r.random() < 0.4,
        "use_dp_batch_balance": r.random() < 0.4,
        "verifier_function": ["acc", "format"],
        "verifier_weight": [1.0, 0.5],
    }
    if has_experts and r.random() < 0.5:
        rl["router_replay"] = {"mode": r.choice(["R2", "R3"])}
    if few_rows and num_prompts == 1 and rl["scale_rewards"] == "batch":
        rl["scale_rewards"] = "none"  # one response has no standard deviation
    # from a generator of its own, so that all else of a seed stays as it was
    is_free = rl["rollout_importance_sampling_mode"] is None and rl["top_entropy_quantile"] == 1.0
    if is_free and rl.get("router_replay") != {"mode": "R2"} and random.Random(seed).random() < 0.5:
        rl |= {"old_log_probs": "rollout", "old_log_probs_check_fraction": 0.0}
    training |= _choose_memory(random.Random(f"memory of {seed}"))
    engines = _choose_engines(random.Random(f"engines of {seed}"), layout, has_experts=has_experts)
    if "fsdp" in engines.values():  # what it refuses, whichever role has it
        training |= {"check_weight_copies_interval": 0, "stream_ref_weights": False}
        # the few runs of the default suite stay as they were
        if seed % SEED_OF_ATTEMPT < _FIRST_WITH_MORE:
            training |= {"optimizer_offload_fraction": 0.0}
    if random.Random(f"passes of {seed}").random() < 0.3:  # what a run without them has
        del rl["use_remove_padding"], rl["use_prefix_grouper"]
    bound, rl_mode = _choose_mode(r)
    # the few runs of the default suite stay as they were
    draws_more = seed % SEED_OF_ATTEMPT >= _FIRST_WITH_MORE
    has_roles = draws_more and not bound and _fits_roles(rl, stage) and random.Random(f"roles of {seed}").random() < 0.4
    rl |= rl_mode | (_ROLES if has_roles else {})
    if draws_more and rl.get("use_integrated_worker", True) and random.Random(f"average of {seed}").random() < 0.4:
        rl["ema_decay"], training["eval_data_path"] = 0.75, "prompts.jsonl"
    if "off_policy_token_limit" in rl and not bound:
        del rl["off_policy_token_limit"]
    generate = {
        "infer_tensor_parallel_size": 1,
        "max_num_seqs": 64,
        "max_model_len": _CONTEXT,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "sampling_config": {"max_tokens": MAX_TOKENS, "temperature": r.choice([0.7, 1.0, 1.3]), "top_k": r.choice([-1, 20])},
    }
    if draws_more:
        generate |= _choose_silent(random.Random(f"silent keys of {seed}"), generate["sampling_config"])
    keys: dict[str, Any] = {
        "megatron_training": training,
        "actor_config": dict(optimizer),
        "ref_config": {"engine": engines["ref"]},
        "rl_config": rl,
        "generate_config": generate,
    }
    if draws_more and engines["actor"] == "fsdp" and random.Random(f"gradients of {seed}").random() < 0.5:
        keys["actor_config"]["offload_gradients"] = True
    if stage == "ray_ppo":
        keys["critic_config"] = optimizer | {"lr": 0.2, "engine": engines["critic"]}
    routed = has_experts and rl.get("router_replay", {}).get("mode") == "R3"
    rows = _generate_rows(r, num_prompts, group_size, bound, routed)
    if has_roles:
        rows = _give_roles(random.Random(f"turns of {seed}"), rows)
    greedy = [None if r.random() < 0.1 else r.randrange(-4, 5) / 4 for _ in range(num_prompts)]
    return RandomRun(seed, size, model, {"platform": "cpu"} | keys, rows, greedy, group_size)


#: an episode of two roles; the rewards of turns are halved in the total
_ROLES = {
    **{"multi_turn_enable": True, "agent_loop": "roles", "environment": "games:Duel", "max_total_response_length": 32},
    "trajectory_reward_weight": 0.5,
}


def _fits_roles(rl: Keys, stage: str) -> bool:
    """Whether the rules let the rows of a run be episodes of several roles."""
    if stage == "ray_ppo" or rl["adv_estimator"] in ("remax", "gdpo") or rl["init_kl_coef"] and rl["use_kl_in_reward"]:
        return False
    return rl.get("use_remove_padding", True) or not rl["use_dynamic_bsz"]


def _give_roles(r: random.Random, rows: list[Row]) -> list[Row]:
    """The rows as episodes: each sequence is a role's, and its turn has a reward."""
    return [
        replace(row, turns=tuple((role, r.choice([-1.0, 0.0, 0.5])) for role, _ in zip(("left", "right"), row.sequences)))
        for row in rows
    ]


def _choose_silent(r: random.Random, sampling: Keys) -> Keys:
    """Keys of the rollout engine that no number of training depends on."""
    keys: Keys = {"sampling_config": sampling | r.choice([{}, {"stop_token_ids": [5, 9]}])}
    return keys | r.choice([{}, {"sleep_mode_extra_cleanup": True, "infer_moe_token_dispatcher_type": "allgather"}])


def _choose_memory(r: random.Random) -> Keys:
    """Keys that save memory and change no number."""
    keys: Keys = {"loss_vocab_chunk_size": r.choice([None, None, 8, 24])}
    if fraction := r.choice([0.0, 0.0, 0.4, 1.0]):
        keys |= {"optimizer_offload_fraction": fraction, "optimizer_offload_path": r.choice([None, "."])}
    return keys | {"stream_ref_weights": r.choice([False, True])}


def _choose_engines(r: random.Random, layout: Keys, *, has_experts: bool) -> dict[str, str]:
    """The engine of each role: the layout's, or for some roles the other one where no layer is divided."""
    own = layout.get("engine", "megatron")
    other = "megatron" if own == "fsdp" else "fsdp"
    may_differ = not has_experts and layout in ({}, RECOMPUTE, _FSDP, _FSDP | RECOMPUTE)
    return {"actor": own} | {role: other if may_differ and r.random() < 0.3 else own for role in ("ref", "critic")}


def _choose_mode(r: random.Random) -> tuple[int, Keys]:
    """(versions that a token may be older, keys) of a mode of rollout."""
    mode = r.choice(["sync"] * 4 + ["one_step_off", "async", "partial"])
    if mode == "sync":
        return 0, {"guarantee_order": r.random() < 0.5}
    limit: Keys = {"off_policy_token_limit": 1.0} if r.random() < 0.5 else {}
    if mode == "partial":
        return 2, {"partial_rollout_max_split": 2} | limit
    own = {"use_integrated_worker": False, "rollout_resource": {"num_npus": 1}, "trainer_mode": mode}
    if mode == "one_step_off":
        return 1, own | limit
    return 2, own | {"max_off_policy_threshold": 2.0, "max_off_policy_strategy": r.choice(["pace", "wait", "drop"])} | limit


def _choose_objective(r: random.Random, stage: str) -> Keys:
    """The keys that make up the loss; all that the slow reference reads are set."""
    loss = r.choice(["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "cispo_cap", "sapo", "gspo"])
    levels = ["sequence", "sequence_token"] if loss == "gspo" else ["token", "token", "sequence", "sequence_token"]
    estimators = ["group_norm", "group_norm", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gdpo"]
    estimator = "gae" if stage == "ray_ppo" else r.choice(estimators)
    keys: Keys = {
        "loss_type": loss,
        "importance_sampling_level": r.choice(levels),
        "clip_higher_enable": True,
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 1.4 if loss == "cispo_cap" else 0.25,
        "clip_ratio_c": r.choice([None, None, 1.6]),
        "delta": r.choice([None, None, 1.5]),
        "tau_pos": 1.0,
        "tau_neg": 1.3,
        "entropy_coeff": r.choice([0.0, 0.0, 0.05, -0.02]),
        "top_entropy_quantile": r.choice([1.0, 1.0, 0.37]),
        "off_policy_sequence_mask_delta": r.choice([None, None, 0.03]),
        "overlong_filter": r.random() < 0.3,
        "adv_estimator": estimator,
        "scale_rewards": r.choice(["group", "batch", "none"]) if estimator == "group_norm" else "group",
        "adv_epsilon": 1e-3,
        "gamma": r.choice([1.0, 0.9]),
        "lam": 0.95,
        "advantage_whiten": r.random() < 0.7,
        "cliprange_value": 0.3,
        "kl_penalty": r.choice(["k1", "abs", "k2", "k3", "k3+", "low_var_kl"]),
        "init_kl_coef": r.choice([0.0, 0.2, 0.2]),
        "use_kl_in_reward": r.random() < 0.3,
        "kl_clamp": r.random() < 0.5,
        "use_bias_correction_kl": r.random() < 0.4,
        "rollout_importance_sampling_mode": None,
        "rollout_importance_sampling_threshold": 1.2,
        "rollout_importance_sampling_threshold_min": r.choice([None, 0.85]),
        "off_policy_token_limit": None,
    }
    if r.random() < 0.5:
        kinds = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask")
        keys["rollout_importance_sampling_mode"] = r.choice([*kinds, "token_geometric_mask"])
    keys |= {"clip_ratio_c": None, "delta": None} if loss in ("cispo", "cispo_cap", "sapo") else {}
    if keys["delta"] is not None:  # it bounds the same branch
        keys["clip_ratio_c"] = None
    if not (keys["rollout_importance_sampling_mode"] or "").endswith("mask"):
        keys["rollout_importance_sampling_threshold_min"] = None
    keys["use_kl_in_reward"] = keys["use_kl_in_reward"] and estimator != "gdpo"
    if stage == "ray_ppo":
        keys["critic_warmup"] = r.choice([0, 0, ITERATION + 1])
    del keys["off_policy_token_limit"]
    return keys


def _generate_rows(r: random.Random, num_prompts: int, group_size: int, bound: int, routed: bool) -> list[Row]:
    has_context, has_turns = r.random() < 0.3, r.random() < 0.2
    rows = []

    def tokens(low: int, high: int) -> list[int]:
        return [r.randrange(2, 127) for _ in range(r.randint(low, high))]

    def experts() -> list[list[int]]:
        return [r.sample(range(4), 2) for _ in range(4)]

    for _ in range(num_prompts):
        prompt = tokens(1, 8)
        of_prefix: dict[tuple[int, ...], list[list[int]]] = {}
        for _ in range(group_size):
            stretches = [(tokens(1, 10), True)]
            if has_context and r.random() < 0.7:
                stretches += [(tokens(1, 4), False), (tokens(1, 4), True)]
            sequences = [RowSequence(prompt, stretches)]
            if has_turns and r.random() < 0.6:
                sequences.append(RowSequence(prompt + tokens(1, 5), [(tokens(1, 5), True)]))
            length = sum(len(sequence.response) for sequence in sequences)
            first = r.randint(0, bound)
            # later tokens come from the same weights or newer ones
            ages = sorted((r.randint(0, first) for _ in range(length)), reverse=True)
            routing = None
            if routed:
                sizes = [len(sequence.prompt) + len(sequence.response) - 1 for sequence in sequences]
                routing = [[experts() for _ in range(n)] for n in sizes]
                # sequences that share a prefix of their prompts have its experts in common; the last token of a prompt is
                # computed in each of them
                for sequence, tokens_of in zip(sequences, routing):
                    for end in range(1, len(sequence.prompt)):
                        tokens_of[end - 1] = of_prefix.setdefault(tuple(sequence.prompt[:end]), tokens_of[end - 1])
            failed, parts = r.random() < 0.08, {"acc": float(r.random() < 0.5), "format": r.choice([None, 0.0, 0.25, 1.0])}
            rows.append(
                Row(
                    sequences,
                    truncated=r.random() < 0.15,
                    ages=ages,
                    rollout_noise=[r.gauss(0, 0.15) for _ in range(length)],
                    drift=[r.gauss(0, 0.2) for _ in range(length)],
                    reward=None if failed else parts["acc"] + 0.5 * (parts["format"] or 0.0),
                    parts=parts,
                    routing=routing,
                )
            )
    return rows

"""The product of features: ingredients of a run file, which pairs of them the rules allow, and runs that cover all of these.

    .venv/bin/python tests/product_matrix.py     # the matrix: last day of each allowed pair, rule of each refused one

`test_product.py` compares the runs with `slow_product.py`. An ingredient is a record; a new one is a line in INGREDIENTS.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import product_judges
import product_rewards
import remote_code_model
import tiny_hf
import tiny_prediction
import torch
import transformers
import yaml
from megatron_release import GROUPED_EXPERTS
from random_runs import Row, _choose_objective
from slow_layouts import EP, MOE_RECOMPUTE, PP, RECOMPUTE, RING, SP, ULYSSES, VPP
from tokenizers import Tokenizer, decoders, models

from mindspeed_rl.config import ConfigError, build_run_config
from mindspeed_rl.run.models import plan_models, with_model_configs
from mindspeed_rl.run.resolve import resolve

Keys = dict[str, Any]

_CONTEXT, MAX_TOKENS, _NUM_PROMPTS = 64, 10, 40
#: tokens of a prompt where longer ones are cut; rows have 2 to 7
_CUT = 5
#: ingredients of a run, at most: more of them may hide each other
_MOST = 15
#: the runs that have equalled their reference, as [last day, seed, ingredients]
_COMPARED = Path(__file__).parent / "product_compared.json"
#: the last day of a pair that no run has compared
_NEVER = "never"
#: starts the reason of a pair that the tests themselves keep apart
_APART = "- "
#: ingredients with which a run is compared to within the rounding of bfloat16, or without its random updates
_ROUGH = frozenset(("bf16", "bf16_sums", "gated_delta", "dropout"))


@dataclass(frozen=True)
class Ingredient:
    """A feature of a run file.

    Attributes:
        keys: what it sets, by group.
        compared: what shows that it is right.
        needs: ingredients without which it means nothing; they come with it.
        model: the model that it needs, where it is not any.
        doubles: it needs twice as many processes.
        without: names of other ingredients that set the same keys to other values, or are other ways to the same.
    """

    name: str
    keys: Mapping[str, Keys]
    compared: str
    needs: tuple[str, ...] = ()
    model: str = ""
    doubles: bool = False


_REFERENCE = "transformers in float64: log-probs, loss, gradients, weights after the step"
_SAME = "the same reference, which knows nothing of it"


#: weight of the judges' score in the total
JUDGES_WEIGHT = 0.25


def _train(**keys: Any) -> Mapping[str, Keys]:
    return {"megatron_training": keys}


def _rl(**keys: Any) -> Mapping[str, Keys]:
    return {"rl_config": keys}


def _generate(**keys: Any) -> Mapping[str, Keys]:
    return {"generate_config": keys}


def _few_tokens(rest: str) -> Mapping[str, Keys]:
    return _rl(distillation={"topk": 6, "topk_rest": rest})


_LORA = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}

INGREDIENTS = [
    # models
    Ingredient("tied", {}, _REFERENCE, model="tied"),
    Ingredient("experts", {}, _REFERENCE, model="moe_mixed"),
    Ingredient("latent", {}, _REFERENCE, model="deepseek"),
    Ingredient("gated_delta", {}, "the same, to rounding in bfloat16", model="hybrid", needs=("bf16",)),
    Ingredient("prediction", _train(mtp_num_layers=1, mtp_loss_scaling_factor=0.3), _REFERENCE, model="predicting"),
    Ingredient("whole_prediction", _train(mtp_detach_heads=False), _REFERENCE, model="predicting", needs=("prediction",)),
    Ingredient(
        "own_code",
        {"megatron_training": {"trust_remote_code": True}, "generate_config": {"trust_remote_code": True}},
        _REFERENCE,
        model="own",
        needs=("fsdp", "module_engine"),
    ),
    # layouts
    Ingredient("tensor", _train(**SP), _SAME, doubles=True),
    Ingredient("pipeline", _train(**PP), _SAME, doubles=True),
    Ingredient("virtual_pipeline", _train(**VPP), _SAME, doubles=True),
    Ingredient("ring", _train(**RING), _SAME, doubles=True),
    Ingredient("ulysses", _train(**ULYSSES), _SAME, doubles=True),
    Ingredient("expert_parallel", _train(**EP), _SAME, doubles=True, needs=("experts|latent",)),
    Ingredient("data_parallel", _train(use_distributed_optimizer=True), _SAME, doubles=True),
    Ingredient("grouped_experts", _train(moe_grouped_gemm=GROUPED_EXPERTS), _SAME, needs=("experts|latent",)),
    Ingredient("fsdp", _train(engine="fsdp"), _SAME),
    Ingredient("fsdp_copies", _train(fsdp_size=1), _SAME, needs=("fsdp", "data_parallel")),
    Ingredient(
        "half_moments",
        _train(optimizer_state_dtype="bfloat16"),
        "the same reference, to within a step of bfloat16 of each moment",
        needs=("fsdp",),
    ),
    Ingredient("host_gradients", _train(offload_gradients=True), _SAME, needs=("fsdp",)),
    Ingredient("other_critic", {"critic_config": {"engine": "megatron"}}, _SAME, needs=("fsdp", "critic")),
    Ingredient("recompute", _train(**RECOMPUTE), _SAME),
    Ingredient("moe_recompute", _train(**MOE_RECOMPUTE), _SAME, needs=("experts|latent",)),
    Ingredient(
        "bf16",
        {"megatron_training": {"bf16": True}, "generate_config": {"dtype": "bfloat16"}},
        "the same reference, to rounding in bfloat16",
    ),
    Ingredient("bf16_sums", _train(grad_reduce_in_fp32=False), "the same, to rounding in bfloat16", needs=("bf16",)),
    Ingredient(
        "offload",
        _generate(offload_train_optimizer=True, offload_train_grad=True, offload_train_param=True),
        _SAME,
    ),
    Ingredient("streamed_ref", _train(stream_ref_weights=True), _SAME),
    Ingredient("copies", _train(check_weight_copies_interval=1), "no copy of a weight differs"),
    # the update
    Ingredient(
        "muon",
        _train(optimizer="muon", muon_extra_scale_factor=0.02, muon_momentum=0.9),
        _REFERENCE,
    ),
    Ingredient("lora", _train(**_LORA), "merged weights in each pass; the norm of the update's gradient"),
    Ingredient("share_backbone", _rl(share_backbone=True), "the reference is the first model", needs=("lora",)),
    Ingredient("adapter_push", _generate(lora_push="adapter"), "log-probs of the engine", needs=("lora",)),
    Ingredient(
        "dropout",
        {"megatron_training": {"hidden_dropout": 0.1}, "rl_config": {"dropout_in_update": True}},
        "all passes; the update is random, its copies are equal",
    ),
    Ingredient("balancing", _train(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02), _REFERENCE, needs=("experts",)),
    Ingredient(
        "sequence_balancing",
        _train(moe_router_load_balancing_type="seq_aux_loss"),
        _REFERENCE,
        needs=("balancing", "experts"),
    ),
    Ingredient("router_bias", _train(moe_router_bias_update_rate=0.01), "the formula of the bias", model="deepseek"),
    Ingredient("replay_r2", _rl(router_replay={"mode": "R2"}), _REFERENCE, needs=("experts|latent", "mini_batches")),
    Ingredient("replay_r3", _rl(router_replay={"mode": "R3"}), _REFERENCE, needs=("experts|latent",)),
    # batches
    Ingredient("padded", _rl(use_remove_padding=False), _SAME),
    Ingredient("budget", _rl(use_dynamic_bsz=True, max_packing_token_size=96), _SAME),
    Ingredient("dynamic_context", _train(dynamic_context_parallel=True), _SAME, needs=("ring|ulysses", "budget")),
    Ingredient("prefixes", _rl(use_prefix_grouper=True), _SAME),
    Ingredient("mini_batches", _rl(mini_batch_size=2, epochs=2), _REFERENCE),
    Ingredient("shuffled", _rl(shuffle_mini_batch=True), _REFERENCE, needs=("mini_batches",)),
    Ingredient("balanced", _rl(use_dp_batch_balance=True), _SAME),
    # the objective
    Ingredient("sync_ref", _rl(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3), _REFERENCE),
    Ingredient("kl_in_reward", _rl(use_kl_in_reward=True), _REFERENCE),
    Ingredient(
        "critic",
        {
            "megatron_training": {"stage": "ray_ppo"},
            "rl_config": {"adv_estimator": "gae", "critic_warmup": 0},
            "critic_config": {},
        },
        _REFERENCE,
    ),
    Ingredient("remax", _rl(adv_estimator="remax"), _REFERENCE),
    Ingredient(
        "distillation",
        _rl(
            distillation={
                "enabled": True,
                "teacher_models": ["TEACHER"],
                "distillation_loss_coef": 0.5,
            }
        ),
        _REFERENCE,
    ),
    Ingredient("dropped", _few_tokens("drop"), _REFERENCE, needs=("distillation",)),
    Ingredient("lumped", _few_tokens("lump"), _REFERENCE, needs=("distillation",)),
    Ingredient("renormalized", _few_tokens("renormalize"), _REFERENCE, needs=("distillation",)),
    Ingredient(
        "teachers_alone",
        _rl(distillation={"use_task_rewards": False}),
        "the divergence without a policy's loss; advantages of rewards of 0",
        needs=("distillation",),
    ),
    Ingredient(
        "mixed",
        _rl(distillation={"on_policy_fraction": 0.5, "response_column": "labels", "supervised_coef": 0.2}),
        "one of both iterations has the tokens of the data, chosen by the formula; divergence and -log q of them",
        needs=("teachers_alone", "distillation"),
    ),
    Ingredient(
        "recorded_old",
        _rl(old_log_probs="rollout", old_log_probs_check_fraction=0.5),
        "transformers, with the recorded log-probs as the old policy's",
    ),
    Ingredient("correction", _rl(rollout_importance_sampling_mode="token_truncate"), _REFERENCE),
    # prompts and responses
    Ingredient(
        "renamed_columns",
        _train(map_keys={"prompt": "question", "query": "", "response": "answer"}),
        "prompts and labels of these columns",
    ),
    Ingredient("cut_prompts", _rl(max_prompt_length=_CUT, long_prompts="cut_left"), "the last tokens of each prompt's row"),
    Ingredient("curriculum", _rl(prompt_curriculum="rate"), "the order of the column"),
    Ingredient("replayed_prompts", _rl(prompt_replay_fraction=0.5, prompt_replay_below=0.9), _SAME),
    Ingredient(
        "filtered",
        _rl(filter_groups_enable=True, filter_groups_metric="product_rewards:even", filter_groups_max_batches=8),
        "groups that vary",
    ),
    Ingredient("resampled", _rl(dynamic_sample=True), _SAME),
    Ingredient(
        "drafts",
        _generate(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}),
        "responses of a run without them",
    ),
    Ingredient(
        "agents",
        _rl(multi_turn_enable=True, environment="product_rewards:TwoTurns", max_total_response_length=24),
        "log-probs by turn; texts of the environment do not train",
    ),
    Ingredient(
        "roles",
        _rl(multi_turn_enable=True, agent_loop="roles", environment="product_rewards:Pair", max_total_response_length=36),
        "advantages of each role by its own rewards, from the tokens",
    ),
    Ingredient(
        "opponents",
        _rl(opponents={"roles": ["left", "right"], "share": 0.7, "interval": 1, "size": 2}),
        "log-probs of its tokens by the weights of its version; rewards of the other role from the texts of both",
        needs=("roles", "lora", "adapter_push"),
    ),
    Ingredient(
        "role_adapters",
        {
            "rl_config": {"role_adapters": {"left": "one", "right": "two"}},
            "megatron_training": {"lora_ckpt_filter": True},
        },
        "transformers with a model per adapter: each steps by the loss of its role's tokens",
        needs=("roles", "lora", "adapter_push"),
    ),
    Ingredient(
        "judges",
        _rl(judge_vote="median", judge_weight=JUDGES_WEIGHT),
        "rewards: the median of three judges' scores, from the tokens",
    ),
    Ingredient("levels", _rl(prompt_level_key="level", prompt_level_prompts=4, prompt_level_pass_rate=0.4), "levels by hand"),
    Ingredient("partial", _rl(partial_rollout_max_split=2, guarantee_order=False), "versions of tokens"),
    Ingredient("unordered", _rl(guarantee_order=False, actor_rollout_dispatch_size=2), _SAME),
    Ingredient("cut_offs", _generate(sampling_config={"top_k": 20, "top_p": 0.9}), "log-probs of the whole distribution"),
    Ingredient("stop_tokens", _generate(sampling_config={"stop_token_ids": [53, 101]}), "where responses end"),
    Ingredient("stop_texts", _generate(sampling_config={"stop": ["a", "Q"]}), "where responses end"),
    Ingredient(
        "form",
        _generate(sampling_config={"structured_output": {"regex": "[a-z]{2,6}"}}),
        "log-probs of the whole distribution",
    ),
    Ingredient("quantized", _generate(quantization="int8"), "log-probs to within 0.15"),
    Ingredient(
        "spread_experts",
        _generate(enable_expert_parallel=True, infer_expert_parallel_size=2),
        "log-probs of the engine",
        needs=("experts|latent", "data_parallel"),
    ),
    Ingredient(
        "npu_engine",
        _generate(sleep_mode_extra_cleanup=True, infer_moe_token_dispatcher_type="allgather"),
        "the same reference: off the NPU they change nothing",
    ),
    Ingredient("module_engine", _generate(engine="transformers"), _SAME),
    # beside training
    Ingredient(
        "evaluated",
        _train(eval_n_samples=2, eval_temperature=0.8, eval_interval=1, eval_num_prompts=3),
        "log-probs and rewards of its responses, by transformers and by hand; the run without it, bit by bit",
    ),
    Ingredient(
        "averaged",
        _rl(ema_decay=0.75),
        "the formula over the weights of all steps; evaluations of it; the run without it, bit by bit",
        needs=("evaluated",),
    ),
    Ingredient(
        "audited",
        {"audit": {"verifier_function": ["product_rewards:low"], "interval": 1, "num_prompts": 3}},
        "log-probs and both scores of its responses; the run without it, bit by bit",
    ),
    Ingredient("prefix_caching", _generate(enable_prefix_caching=True), _SAME),
    Ingredient("delta_sync", _generate(update_weight_mode="delta"), _SAME),
    Ingredient("resumed", {"megatron_training": {"save_interval": 1}, "actor_config": {"save": "SAVE"}}, "the next iteration"),
]
#: features that are no ingredient -> why, and what combines them with others instead
NOT_HERE = {
    "elastic_rollout": "its servers are processes of their own, and the time decides how long those on the trainers' devices "
    "generate, so that no run repeats; tests/e2e/test_random_modes.py draws complete runs with it",
    "elastic_training_devices": "a move is a resume on another layout, which the ingredient resumed has; when it comes depends "
    "on the time; tests/e2e/test_elastic_training.py compares the iterations after a move with a resume by hand",
    "videos": "the processes of these runs do not load models of images, and the reference reads tokens alone; "
    "tests/e2e/test_random_modes.py draws complete runs with them, tests/dist/test_video_layouts.py has the layouts",
    "language_model_only": "it leaves out a tower, which models of these runs do not have; "
    "tests/e2e/test_random_modes.py draws complete runs with it",
    "mxfp8, w4a8": "the reference has int8 (`quantized`), and coarser formats need wider bounds of all comparisons; "
    "tests/e2e/test_random_modes.py draws complete runs with them, tests/unit/rollout/test_int8_rollout.py has the numbers",
}
#: what no number of training depends on
SILENT = frozenset(("evaluated", "averaged", "audited"))
#: texts and tokens that end a response
STOP_TEXTS, STOP_TOKENS = ("a", "Q"), (53, 101)
BY_NAME = {ingredient.name: ingredient for ingredient in INGREDIENTS}


def complete(names: Iterable[str]) -> list[frozenset[str]]:
    """The sets of ingredients with what they need: one for each alternative."""
    results = [frozenset[str]()]
    for name in names:
        options = [[name]]
        for needed in BY_NAME[name].needs:
            options.append(needed.split("|"))
        results = [result | set(chosen) for result in results for chosen in itertools.product(*options)]
    return list(dict.fromkeys(results))


class ConflictError(ValueError):
    """Two ingredients set a key to different values, or need different models."""


#: groups that one ingredient sets as a whole
_WHOLE = ("structured_output", "speculative_config", "router_replay", "stop")
_Path = tuple[str, ...]


def _merge(target: Keys, added: Mapping[str, Any], owners: dict[_Path, str], name: str, path: _Path = ()) -> None:
    for key, value in added.items():
        where = (*path, key)
        if isinstance(value, Mapping) and key not in _WHOLE:
            _merge(target.setdefault(key, {}), value, owners, name, where)
            continue
        if where in owners and target[key] != value:
            raise ConflictError(f"{owners[where]} and {name} set {where[-1]} to different values")
        owners[where] = name
        target[key] = value


@dataclass
class ProductRun:
    """A run of some ingredients.

    Attributes:
        objective: keys of the loss.
        path: the run file.
        written: its keys.
        keys: the same, each role with those that all roles share.
        played: texts of both roles in the episodes of the run.
    """

    names: frozenset[str]
    seed: int
    objective: Keys
    group_size: int = 2
    path: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    size: int = 1
    model: str = "untied"
    played: list[tuple[str, str]] = field(default_factory=list)
    _tokenizer: Any = None
    _num_open: int = 1  # levels of prompts

    def build(self, folders: Mapping[str, Mapping[str, str]], folder: Path) -> None:
        """Make the run file.

        Raises:
            ConflictError: ingredients exclude each other by themselves.
        """
        chosen = [BY_NAME[name] for name in BY_NAME if name in self.names]
        wanted = {ingredient.model: ingredient.name for ingredient in chosen if ingredient.model}
        if len(wanted) > 1:
            raise ConflictError(f"{' and '.join(wanted.values())} need different models")
        self.model = next(iter(wanted), "untied")
        keys, owners = _base(self.seed, self.group_size), dict[tuple[str, ...], str]()
        keys["rl_config"] |= self.objective
        for ingredient in chosen:
            _merge(keys, copy.deepcopy(dict(ingredient.keys)), owners, ingredient.name)
        self.size = _count_processes(chosen, keys["megatron_training"])
        mine = folders[self.model]
        keys["rl_config"]["actor_resource"] = {"num_npus": self.size}
        renamed = "renamed_" if "renamed_columns" in self.names else ""
        keys["megatron_training"]["data_path"] = mine[f"{renamed}prompts"]
        if "evaluated" in self.names:
            keys["megatron_training"] |= {
                "eval_data_path": mine[f"{renamed}held_out"],
                "eval_sets": {"other": mine[f"{renamed}others"]},
            }
        if "audited" in self.names:
            keys["audit"]["data_path"] = mine[f"{renamed}others"]
        keys["megatron_training"]["tokenizer_name_or_path"] = mine["actor"]
        keys["actor_config"]["load"] = mine["actor"]
        if not keys["rl_config"].get("share_backbone"):
            keys["rl_config"]["integrated_mode_config"] = {"ref_model_load_path": mine["ref"]}
        if "critic_config" in keys:
            if "critic" not in mine:
                raise ConflictError("no critic of this model is made")
            keys["critic_config"] |= {name: keys["actor_config"][name] for name in _OPTIMIZER} | {"lr": 0.2}
            keys["critic_config"]["load"] = mine["critic"]
        if "distillation" in keys["rl_config"]:
            term = keys["rl_config"]["distillation"]
            term |= _choose_divergence(self.seed) | term | {"teacher_models": [mine["teacher"]]}
            if "teachers_alone" in self.names:
                del term["distillation_loss_coef"]  # which is next to rewards that train
            if "mixed" in self.names:
                term["on_policy_fraction"] = sum(self._draw_mixture(iteration) for iteration in (1, 2)) / 2
        if "judges" in self.names:
            url, (first, *others) = mine["judges"], product_judges.JUDGES
            keys["rl_config"] |= {"judge_url": url, "judge_model": first, "judge_prompt": mine["judge_prompt"]}
            keys["rl_config"]["judge_panel"] = [f"{model}@{url}" for model in others]
        for role, kind in (("actor_config", "actor"), ("critic_config", "critic")) if "resumed" in self.names else ():
            if role in keys:
                save = str(folder / f"{kind}-save")
                keys[role] |= {"save": save, "load": save, "pretrained_checkpoint": mine[kind], "finetune": False}
        self.written = copy.deepcopy(keys)
        self.keys = keys
        # what the reference reads
        for role in ("actor_config", "critic_config"):
            if role in keys:
                keys[role] = {"muon_momentum": 0.95} | keys["megatron_training"] | keys[role]

    def _draw_mixture(self, iteration: int) -> float:
        """Number below the fraction where the student samples an iteration: ms-swift's, of the seed and the steps before it."""
        steps = 4 if "mini_batches" in self.names else 1
        return random.Random(self.seed % 1000 + (iteration - 1) * steps).random()

    def samples_responses(self, iteration: int) -> bool:
        """Whether the student samples the responses of an iteration."""
        if "mixed" not in self.names:
            return True
        return self._draw_mixture(iteration) < self.keys["rl_config"]["distillation"]["on_policy_fraction"]

    def write(self, folder: Path) -> None:
        """Write the run file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.written, sort_keys=False))
        self.path = str(path)

    def resolve(self) -> None:
        """Ask the rules.

        Raises:
            ConfigError: one of them refuses the run.
        """
        plan_models(resolve(with_model_configs(build_run_config(self.written, config_name="product")), platform="cpu"))

    @property
    def why_no_update(self) -> str:
        """Why the update has no reference."""
        reasons = {
            "the update is random": {"dropout"},
        }
        return "; ".join(reason for reason, names in reasons.items() if names <= self.names)

    def check_prompts(self, columns: Mapping[str, Any], iteration: int) -> None:
        """Prompts come from their rows, cut where they are too long; with a curriculum, large pass rates come first."""
        path = Path(self.written["megatron_training"]["data_path"])
        names = ("question", "answer") if "renamed_columns" in self.names else ("prompt", "labels")
        rows = {row["rate"]: [row[name] for name in names] for row in map(json.loads, path.read_text().splitlines())}
        for extra, prompt, label in zip(columns["extra"], columns["prompt_ids"], columns["labels"], strict=True):
            text, expected_label = rows[float(extra["rate"])]
            assert label == expected_label, f"the label of {text} is {label}"
            cut = text[-_CUT:] if "cut_prompts" in self.names else text
            assert list(prompt) == [ord(letter) for letter in cut], f"the prompt of {text} is {list(prompt)}"
        if self.names & {"filtered", "resampled", "replayed_prompts", "partial"}:
            return
        if "levels" in self.names:
            self._check_levels(columns)
            return
        if "curriculum" not in self.names:
            return
        rates = sorted(rows, reverse=True)
        found = [float(extra["rate"]) for extra in columns["extra"][:: self.group_size]]
        expected = rates[4 * (iteration - 1) : 4 * iteration]
        assert found == expected, f"prompts of the pass rates {found}, and not {expected}"

    def _check_levels(self, columns: Mapping[str, Any]) -> None:
        """A level opens when its last four prompts, those of an iteration, pass in the mean of their responses."""
        found = [int(extra["level"]) for extra in columns["extra"][:: self.group_size]]
        assert max(found) < self._num_open, f"prompts of the levels {found} while {self._num_open} levels are open"
        size = self.group_size
        passed = [float(reward) >= 0.5 for reward in columns["rewards"]]
        rates = [sum(passed[start : start + size]) / size for start in range(0, len(passed), size)]
        highest = [rate for rate, level in zip(rates, found, strict=True) if level == self._num_open - 1]
        # fewer prompts of the level complete a window with those of earlier iterations
        if len(highest) < 4 or sum(highest) / 4 >= 0.4:
            self._num_open += 1

    def version(self, metrics: Mapping[str, float]) -> int:
        """Version of the weights that train in an iteration."""
        return int(metrics["iteration"]) - 1

    def score(self, row: Row, reward: float | None = None) -> float:
        """The total reward of the tokens of a response; for the reward see `score_roles`."""
        points = sum(self.score_roles(row, reward).values()) if "roles" in self.names else 0.0
        if "judges" in self.names:
            points += JUDGES_WEIGHT * product_judges.score(row.response)
        if "agents" in self.names:
            points += sum(_count_a(tokens) for sequence in row.sequences for tokens, sampled in sequence.stretches if sampled)
        return product_rewards.even(row.response) + 0.5 * product_rewards.low(row.response) + points

    def score_roles(self, row: Row, reward: float | None = None) -> dict[str, float]:
        """The points of each role that has spoken, in the order of their sequences; see `product_rewards.Pair`.

        Args:
            row: a role that an opponent plays has no sequence.
            reward: the reward of the row, which decides between episodes in which the other role has said the same.
        """
        own = [sequence.response for sequence in row.sequences]
        assert len(own) <= 2, "a role has more than one sequence"
        if "opponents" in self.names and len(own) == 1:
            if bytes(row.sequences[0].prompt).endswith(b"more="):
                return {"right": float(own[0].count(ord("b")))}
            said = self._decode_turn(own[0])
            lost_to = {right.count("b") for left, right in self.played if left == said}
            assert lost_to, f"no episode has left say {said!r}"
            rest = product_rewards.even(own[0]) + 0.5 * product_rewards.low(own[0])
            rest += JUDGES_WEIGHT * product_judges.score(own[0]) if "judges" in self.names else 0.0
            points = [float(_count_a(own[0]) - lost) for lost in sorted(lost_to)]
            return {"left": min(points, key=lambda value: 0.0 if reward is None else abs(value + rest - reward))}
        lost = own[1].count(ord("b")) if len(own) == 2 else 0
        return dict(list({"left": float(_count_a(own[0]) - lost), "right": float(lost)}.items())[: len(own)])

    def _decode_turn(self, tokens: list[int]) -> str:
        """The text of a turn, as an environment gets it."""
        ends = (1, *(STOP_TOKENS if "stop_tokens" in self.names else ()))
        if self._tokenizer is None:
            self._tokenizer = _tokenizer()
        text = self._tokenizer.decode(tokens[:-1] if tokens[-1:] and tokens[-1] in ends else tokens)
        assert isinstance(text, str)
        return text

    def check_reward(self, row: Row, reward: float, columns: Mapping[str, Any], index: int) -> None:
        """The total reward follows from the tokens."""
        expected = self.score(row, reward)
        if expected != 0.0 or reward != 0.0:
            assert abs(reward - expected) < 1e-5, f"reward of row {index}: {reward} instead of {expected}"


def _count_a(tokens: list[int]) -> int:
    """Letters a in the text of a turn: the token <pad> has one."""
    return tokens.count(ord("a")) + tokens.count(0)


def _choose_divergence(seed: int) -> Keys:
    """Divergence of a student from all of the teacher's tokens, where no ingredient takes some."""
    r = random.Random(f"divergence of {seed}")
    return {
        "loss_mode": r.choice(["reverse_kl_topk", "forward_kl_topk", "jsd_topk"]),
        "beta": r.choice([0.3, 0.7]),
        "topk": 200,
        "topk_rest": "drop",
    }


_OPTIMIZER = ("lr", "lr_decay_style", "adam_eps", "weight_decay", "clip_grad", "finetune")


def _count_processes(chosen: Sequence[Ingredient], training: Mapping[str, Any]) -> int:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    size = 1
    for name in sizes:
        size *= training.get(name, 1)
    data = any(ingredient.name == "data_parallel" for ingredient in chosen)
    data |= training.get("expert_model_parallel_size", 1) > training.get("context_parallel_size", 1)
    return size * (2 if data else 1)


def plain_objective() -> Keys:
    """Keys of the loss of a run whose ingredients are asked for."""
    return {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "clip_higher_enable": True,
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.25,
        "clip_ratio_c": None,
        "delta": None,
        "tau_pos": 1.0,
        "tau_neg": 1.3,
        "entropy_coeff": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_sequence_mask_delta": None,
        "overlong_filter": False,
        "adv_estimator": "group_norm",
        "scale_rewards": "group",
        "adv_epsilon": 1e-3,
        "gamma": 1.0,
        "lam": 0.95,
        "advantage_whiten": True,
        "cliprange_value": 0.3,
        "kl_penalty": "low_var_kl",
        "init_kl_coef": 0.2,
        "use_kl_in_reward": False,
        "kl_clamp": True,
        "use_bias_correction_kl": False,
        "rollout_importance_sampling_mode": None,
        "rollout_importance_sampling_threshold": 1.2,
        "rollout_importance_sampling_threshold_min": None,
    }


def random_objective(seed: int, names: frozenset[str]) -> Keys:
    """Keys of the loss, drawn: the losses, estimators and corrections are ingredients too."""
    r = random.Random(seed)
    keys = _choose_objective(r, "ray_ppo" if "critic" in names else "ray_grpo")
    keys["init_kl_coef"] = 0.2  # there is a reference
    keys["overlong_filter"] = False  # most responses of a random model end at the limit
    return plain_objective() | keys


def _base(seed: int, group_size: int) -> dict[str, Any]:
    optimizer = {
        "lr": 0.3,
        "lr_decay_style": "constant",
        "adam_eps": 1.0,  # an update is then smooth in the gradient
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "finetune": True,
    }
    return {
        "platform": "cpu",
        "megatron_training": {
            "stage": "ray_grpo",
            "bf16": False,
            "seed": seed % 1000,
            "global_batch_size": 4,
            "seq_length": _CONTEXT,
            "train_iters": 2,
            "micro_batch_size": 2,
            "loss_chunk_size": 16,
            "dataset_additional_keys": ["labels", "rate", "level"],
        },
        "actor_config": dict(optimizer),
        "rl_config": {
            "n_samples_per_prompt": group_size,
            "mini_batch_size": 4,
            "epochs": 1,
            "max_prompt_length": 16,
            "rule_reward": True,
            "use_remove_padding": True,
            "use_prefix_grouper": False,
            "guarantee_order": True,
            "verifier_function": ["product_rewards:even", "product_rewards:low"],
            "verifier_weight": [1.0, 0.5],
            "ref_model_mixup_alpha": 0.3,
            "ref_model_sync_steps": 1,
        },
        "generate_config": {
            "infer_tensor_parallel_size": 1,
            "max_num_seqs": 16,
            "max_model_len": _CONTEXT,
            "max_num_batched_tokens": 512,
            "dtype": "float32",
            "kv_cache_memory_gib": 0.03,
            "sampling_config": {"max_tokens": MAX_TOKENS, "temperature": 0.9},
        },
    }


# ---------------------------------------------------------------------- folders


def make_folders(root: Path, judges: str = "http://127.0.0.1:9/v1") -> dict[str, dict[str, str]]:
    """Model -> folders of its roles, the prompts, and the address and the prompt of judges."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    results = {}
    names = {ingredient.model for ingredient in INGREDIENTS if ingredient.model} | {"untied"}
    for name in sorted(names):
        folder = root / name
        for role, seed in (("actor", None), ("ref", 11), ("teacher", 12)):
            _save_model(name, folder / role, seed)
            _tokenizer().save_pretrained(folder / role)
        results[name] = {role: str(folder / role) for role in ("actor", "ref", "teacher")}
        results[name] |= {kind: str(root / f"{kind}.jsonl") for kind in _FILES}
        results[name] |= {"judges": judges, "judge_prompt": str(root / "judge.txt")}
        if name in _CRITICS:
            torch.manual_seed(13)
            config = copy.deepcopy(tiny_hf.CONFIGS[name])
            config.num_labels = 1
            critic = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
            tiny_hf.spread(critic, 3.0)
            critic.save_pretrained(folder / "critic")
            results[name]["critic"] = str(folder / "critic")
    (root / "judge.txt").write_text(product_judges.PROMPT)
    for place, (kind, count) in enumerate({"prompts": _NUM_PROMPTS, "held_out": 4, "others": 5}.items()):
        rows = _make_rows(random.Random(5 + place), count)
        # the plain columns have other columns' names
        renamed = [
            {"question": row.pop("prompt"), "answer": row.pop("labels"), **row, "prompt": "other=", "labels": "other"}
            for row in copy.deepcopy(rows)
        ]
        for name, written in ((kind, rows), (f"renamed_{kind}", renamed)):
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return results


_FILES = ("prompts", "held_out", "others", "renamed_prompts", "renamed_held_out", "renamed_others")


def _make_rows(r: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": "".join(r.choice("abcdefgh") for _ in range(r.randint(1, 6))) + "=",
            "labels": f"label {index}",
            "rate": index * 17 % 40 / 40,
            "level": index % 4,
        }
        for index in range(count)
    ]


_CRITICS = ("untied", "tied", "moe_mixed")


def _save_model(name: str, folder: Path, seed: int | None) -> None:
    if name == "predicting":
        predicting = tiny_prediction.Predicting.build("mimo")
        if seed is not None:
            torch.manual_seed(seed)
            _nudge(predicting.named_parameters().values())
        predicting.save(folder)
        return
    if name == "own":
        model = remote_code_model.build(remote_code_model.write_code(folder))
        tiny_hf.spread(model, 1.0)  # its layers are steep as they are
    else:
        model = tiny_hf.build(name)
    if seed is not None:
        torch.manual_seed(seed)
        _nudge(model.parameters())
    model.save_pretrained(folder)
    if name == "own":  # as it is published: transformers writes another map of the code
        remote_code_model.write_code(folder)


@torch.no_grad()
def _nudge(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.add_(torch.randn_like(parameter) * 0.003)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a printable character, with its ASCII code as id."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


# ---------------------------------------------------------------------- the matrix


class Rules:
    """What the product's own rules say to sets of ingredients."""

    def __init__(self, folders: Mapping[str, Mapping[str, str]], folder: Path) -> None:
        self._folders, self._folder = folders, folder
        self._known: dict[frozenset[str], str] = {}

    def refusal(self, names: frozenset[str]) -> str:
        """Why a set of ingredients is not a run; empty for a run."""
        if names not in self._known:
            run = ProductRun(names, 1, plain_objective())
            try:
                run.build(self._folders, self._folder)
                run.resolve()
                self._known[names] = ""
            except ConflictError as error:
                self._known[names] = f"{_APART}{error}"
            except (ConfigError, ValueError) as error:
                self._known[names] = " ".join(str(error).split())
        return self._known[names]

    def refusal_of_all(self, names: Iterable[str]) -> tuple[str, frozenset[str]]:
        """(why, "") or ("", the first completed set that is a run)."""
        first = ""
        for option in complete(names):
            why = self.refusal(option)
            if not why:
                return "", option
            first = first or why
        return first, frozenset()


def list_pairs(rules: Rules) -> tuple[dict[frozenset[str], frozenset[str]], dict[frozenset[str], str]]:
    """(allowed pairs with the smallest run of each, refused pairs with the reason)."""
    allowed, refused = {}, {}
    for pair in itertools.combinations(BY_NAME, 2):
        why, option = rules.refusal_of_all(pair)
        if why:
            refused[frozenset(pair)] = why
        else:
            allowed[frozenset(pair)] = option
    return allowed, refused


def cover(
    rules: Rules,
    pairs: Mapping[frozenset[str], frozenset[str]],
    *,
    seed: int = 1,
    compared: Sequence[Compared] = (),
) -> list[frozenset[str]]:
    """Sets of ingredients such that each pair is in one of them; a pair of exact ingredients in a set of such ones.

    Args:
        seed: of the choice among equally good ingredients.
        compared: runs whose pairs need no further one.
    """
    r, results = random.Random(seed), []
    left = {pair: option for pair, option in pairs.items() if find_last_day(pair, bool(option & _ROUGH), compared) == _NEVER}
    while left:
        # exact pairs first: sets of them have no others
        first = min(
            sorted(left, key=lambda pair: (bool(left[pair] & _ROUGH), r.random())), key=lambda p: bool(left[p] & _ROUGH)
        )
        names = left[first]
        rough = names & _ROUGH

        def counts(pair: frozenset[str], rough: frozenset[str] = rough) -> bool:
            return pair in left and (pair & _ROUGH == pair & rough if not rough else bool(pair & rough))

        while len(names) < _MOST:
            gains = {
                name: sum(1 for other in names if counts(frozenset((name, other)))) for name in BY_NAME if name not in names
            }
            candidates = sorted((name for name, gain in gains.items() if gain), key=lambda name: (-gains[name], r.random()))
            fitting = next(filter(None, (_extend(rules, pairs, names, name, rough) for name in candidates)), None)
            if fitting is None:
                break
            names = fitting
        for pair in [pair for pair in left if pair <= names and counts(pair)]:
            del left[pair]
        assert first not in left
        results.append(names)
    return results


def _extend(
    rules: Rules, pairs: Mapping[frozenset[str], Any], names: frozenset[str], name: str, rough: frozenset[str]
) -> frozenset[str] | None:
    """The set with one more ingredient; None where that is not a run, or makes a comparison rough."""
    if any(frozenset((name, other)) not in pairs for other in names):
        return None
    options = (names | option for option in complete([name]))
    return next((one for one in options if _is_small(one) and one & _ROUGH == rough and not rules.refusal(one)), None)


def _is_small(names: frozenset[str]) -> bool:
    return sum(BY_NAME[name].doubles for name in names) <= 2


@dataclass(frozen=True)
class Compared:
    """A run that has equalled its reference, on this day the last time."""

    day: str
    seed: int
    names: frozenset[str]


def record_comparison(names: frozenset[str], seed: int) -> None:
    """Note that a run of these ingredients has equalled its reference today."""
    runs = [run for run in read_comparisons() if run.names != names]
    runs.append(Compared(datetime.date.today().isoformat(), seed, names))
    rows = sorted(([run.day, run.seed, sorted(run.names)] for run in runs), key=lambda row: row[2])
    lines = ",\n".join(map(json.dumps, rows))
    _COMPARED.write_text(f"[\n{lines}\n]\n")


def read_comparisons() -> list[Compared]:
    """The runs that have equalled their reference."""
    return [Compared(day, seed, frozenset(names)) for day, seed, names in json.loads(_COMPARED.read_text())]


def find_last_day(pair: frozenset[str], is_rough: bool, runs: Iterable[Compared]) -> str:
    """The last day on which a pair was compared; a pair of exact ingredients is not compared by a run that is rough."""
    return max((run.day for run in runs if pair <= run.names and bool(run.names & _ROUGH) == is_rough), default=_NEVER)


def print_matrix(root: Path) -> None:
    """Print the pairs; models and run files are made below the folder."""
    rules = Rules(make_folders(root / "models"), root / "run")
    allowed, refused = list_pairs(rules)
    compared = read_comparisons()
    days = {pair: find_last_day(pair, bool(option & _ROUGH), compared) for pair, option in allowed.items()}
    never = sum(day == _NEVER for day in days.values())
    rules_say = {pair: why for pair, why in refused.items() if not why.startswith(_APART)}
    total = len(BY_NAME) * (len(BY_NAME) - 1) // 2
    print(f"{len(BY_NAME)} ingredients are {total} pairs; the rules allow {len(allowed)} and refuse {len(rules_say)}")
    print(f"{len(refused) - len(rules_say)} pairs are apart: they need different models, or values of a key")
    print(f"of the allowed pairs {len(allowed) - never} have been compared in {len(compared)} runs, and {never} never")
    for name, why in NOT_HERE.items():
        print(f"{name} is no ingredient: {why}")
    for pair, day in sorted(days.items(), key=lambda item: sorted(item[0])):
        print(f"allowed  {' x '.join(sorted(pair))}: last compared: {day}")
    for pair, why in sorted(refused.items(), key=lambda item: sorted(item[0])):
        kind = "refused" if pair in rules_say else "apart  "
        print(f"{kind}  {' x '.join(sorted(pair))}: {why.removeprefix(_APART)[:160]}")

"""The plan of a run as a report and as text, before any device is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from mindspeed_rl.catalogue.objective import ROLE_TEACHERS, Distillation
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.schema import Range
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import Sizes, batch_table, round_number
from mindspeed_rl.run.explain.effects import (
    describe_learning_rate,
    find_changed_keys,
    find_keys_without_effect,
    find_warnings,
)
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.placement import Layout
from mindspeed_rl.run.rules.validation import missing_for_training, unavailable, validate

#: the report of `explain`, which `mindspeed-rl explain --json` prints
Report = dict[str, Any]
_LISTED_GROUPS = 4


def explain(run: Run) -> Report:
    """Return all that follows from a run file.

    Keys: `valid`; `errors` (sentences) and `violations` (the same with separate keys and suggestions); `batch`;
    `dispatch_sizes`; `resources`; `formula`; `length` (of a run in passes over its prompts) and `unchecked`, which the command
    fills in; `samples` (of several turns, and drafts); `learning_rate`; `derived` (keys that the file omits and that follow
    from it, each with its value and source); `earlier_names` (keys by deprecated names); `warnings` (settings that cost time
    or results); `changed_keys`; `keys_without_effect`; `unavailable` (switched on, but not in this version) and `missing`
    (needed to start).
    Numbers that are not whole are shown as fractions, so that an invalid plan can be read too.
    """
    cfg, sizes, violations = run.config, run.sizes, validate(run)
    # all tables divide by these numbers; the errors name those below 1
    if sizes is not None and not sizes.can_divide:
        sizes = None
    rollout = None if sizes is None or sizes.counting == "samples" else sizes
    return {
        "valid": not violations,
        "errors": [str(violation) for violation in violations],
        "violations": [
            {
                "rule": item.rule,
                "keys": dict(item.keys),
                "message": item.message,
                "nearest": [dict(option) for option in item.suggestions],
            }
            for item in violations
        ],
        "run": {
            "config_name": cfg.config_name,
            "config_dir": cfg.config_dir,
            "stage": cfg.stage,
            "model": cfg.actor_config.model,
            "platform": cfg.platform,
        },
        "batch": {} if sizes is None else batch_table(sizes, cfg.actor_config.train_iters),
        "dispatch_sizes": (
            {} if rollout is None else {name: round_number(size) for name, size in rollout.dispatch_sizes().items()}
        ),
        "resources": {} if sizes is None else _describe_resources(run, sizes),
        "formula": formula(run),
        "length": "",
        "unchecked": "",
        "samples": _describe_samples(cfg),
        "learning_rate": describe_learning_rate(cfg),
        "derived": {name: {"value": item.value, "from": item.source} for name, item in cfg.derived.items()},
        "earlier_names": {name: note for name, note in cfg.deprecated.items() if note.startswith("read as ")},
        "warnings": find_warnings(run),
        "changed_keys": find_changed_keys(cfg),
        "keys_without_effect": find_keys_without_effect(run),
        "unavailable": unavailable(run),
        "missing": missing_for_training(run),
    }


def report_failure(errors: list[str]) -> Report:
    """Return the report for a run file that cannot be read."""
    return {
        "valid": False,
        "errors": list(errors),
        "violations": [],
        "run": {},
        "batch": {},
        "dispatch_sizes": {},
        "resources": {},
        "formula": "",
        "length": "",
        "unchecked": "",
        "samples": "",
        "learning_rate": "",
        "derived": {},
        "earlier_names": {},
        "warnings": [],
        "changed_keys": {},
        "keys_without_effect": {},
        "unavailable": [],
        "missing": [],
    }


_UNITS = {
    "prompts": "prompts of one rollout (prompt-level counting)",
    "completions": "completions of one optimizer step (completion-level counting)",
    "samples": "samples of one optimizer step",
}


def render(report: Report) -> str:
    """Return the report as text for a terminal, where the last lines are seen first: errors or the verdict."""
    parts: list[str] = []
    run = report["run"]
    if run:
        model = f"model {run['model']}, " if run["model"] else ""  # without a model block it is the one of `load`
        parts.append(f"{run['config_name']}: stage {run['stage']}, {model}platform {run['platform']}")
    if report["batch"]:
        batch = dict(report["batch"])
        counting = batch.pop("counting")
        parts.append(f"Batch; global_batch_size counts {_UNITS[counting]}\n" + _table(batch))
    if report["dispatch_sizes"]:
        parts.append("Rows that leave the data plane at once\n" + _table(report["dispatch_sizes"]))
    if report["resources"]:
        parts.append(_render_resources(report["resources"]))
    if report["formula"]:
        parts.append("Objective\n" + "\n".join(f"  {line}" for line in report["formula"].splitlines()))
    if report["length"]:
        parts.append(f"Length\n  {report['length']}")
    if report["samples"]:
        parts.append(f"Samples\n  {report['samples']}")
    if report["learning_rate"]:
        parts.append(f"Learning rate\n  {report['learning_rate']}")
    if report["derived"]:
        rows = {name: f"{_cell(item['value'])}  from {item['from']}" for name, item in report["derived"].items()}
        parts.append("Derived: keys that are not written\n" + _table(rows))
    if report["changed_keys"]:
        parts.append("Keys that differ from their defaults\n" + _table(report["changed_keys"]))
    if report["keys_without_effect"]:
        parts.append("Keys that are set but have no effect in this run\n" + _table(report["keys_without_effect"]))
    if report["unavailable"]:
        parts.append(
            "Training refuses to start\n"
            + "\n".join(f"  {line}" for line in report["unavailable"])
        )
    if report["missing"]:
        parts.append("Still needed to start training\n" + "\n".join(f"  {line}" for line in report["missing"]))
    if report["earlier_names"]:
        parts.append("Keys by names of earlier releases\n" + _table(report["earlier_names"]))
    if report["warnings"]:
        parts.append("Warnings\n" + "\n".join(f"  - {line}" for line in report["warnings"]))
    if report["unchecked"]:
        parts.append(f"Not checked\n  {report['unchecked']}")
    if report["errors"]:
        parts.append("INVALID\n" + "\n".join(f"  - {error}" for error in report["errors"]))
    if report["valid"]:
        reasons = ["training refuses to start"] if report["unavailable"] else []
        reasons += [f"{len(report['missing'])} key(s) are still needed"] if report["missing"] else []
        parts.append(f"not ready: {' and '.join(reasons)}; see above" if reasons else "valid")
    return "\n\n".join(parts)


def _table(rows: Mapping[str, object]) -> str:
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {_cell(value)}" for name, value in rows.items())


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(_cell(item) for item in value) if isinstance(value, list) else str(value)


def _render_resources(resources: Report) -> str:
    nodes = f"{resources['num_nodes']} node(s) with {resources['devices_per_node']} each"
    lines = [f"Devices: {resources['num_devices']} on {nodes}"]
    if "threads" in resources:
        lines.append(f"Threads of each worker: {resources['threads']} ({resources['threads_reason']})")
    width = max(len(phase["phase"]) for phase in resources["phases"])
    devices = max(len(phase["devices"]) for phase in resources["phases"])
    lines += [f"  {phase['phase']:<{width}}  {phase['devices']:<{devices}}  {phase['holds']}" for phase in resources["phases"]]
    groups = resources.get("parallel_groups", {})
    if groups:
        lines.append("Parallel groups")
        listed = {axis: ranks for axis, ranks in groups.items() if len(ranks[0]) > 1 or axis == "rollout"}
        lines += [f"  {axis:<11}{_shorten_groups(ranks)}" for axis, ranks in listed.items()]
    return "\n".join(lines)


def _shorten_groups(groups: list[list[int]]) -> str:
    """Return groups of ranks as text, the first few of many."""
    listed: list[list[int | str]] = [[*group] if len(group) <= 8 else [*group[:3], "...", group[-1]] for group in groups]
    text = " ".join("[" + " ".join(str(rank) for rank in group) + "]" for group in listed[:_LISTED_GROUPS])
    others = len(groups) - _LISTED_GROUPS
    return f"{text} and {others} more" if others > 0 else text


def _describe_samples(cfg: RunConfig) -> str:
    """Return phrases about turns, spare samples, drafts, int8 and exact log-probs; empty where there is none."""
    rl = cfg.rl_config
    if rl is None or cfg.generate_config is None:
        return ""
    drafts, phrases = cfg.generate_config.drafts, list[str]()
    if rl.spare_samples_per_prompt:
        fate = "continue in its second group" if rl.keep_spare_samples else "are aborted"
        phrases.append(f"{rl.spare_samples_per_prompt} spare samples of each prompt: the unfinished ones {fate}")
    if drafts is not None:
        source = f" of {drafts['model']}" if drafts.get("model") else ""
        same = "responses are those without drafts, token by token"
        if cfg.platform in ("npu", "cuda"):
            same = "the distribution of responses stays, but the same seed gives other tokens"
        limit = f"{drafts.get('num_speculative_tokens')} tokens a step at most"
        phrases.append(f"drafts by {drafts.get('method')}{source}, {limit}: {same}")
    if cfg.generate_config.quantization is not None:
        mode = rl.rollout_importance_sampling_mode or "none, and the difference of the two policies stays in the update"
        phrases.append(f"the engine's matrices are in {cfg.generate_config.quantization}, corrected by {mode}")
    if rl.exact_log_probs:
        slices = f", with sums over ranks in {cfg.exact_slices} slices" if cfg.exact_slices > 1 else ""
        same = f"log-probs of trainer and rollout engine are equal bit for bit{slices}"
        phrases.append(same if cfg.platform == "cpu" else "batch-invariant kernels in trainer and rollout engine")
    if rl.agent_loop_name == "single_turn":
        return "; ".join(phrases)
    loop = rl.agent_loop_name
    program = None if rl.agent is None else rl.agent.url or " ".join(rl.agent.command)
    by = {"scheduler": rl.multi_turn_scheduler, "environment": rl.environment, "program": program}.get(loop)
    tools = "" if rl.tool_config_path is None else f", tools of {rl.tool_config_path}"
    calls = f" with calls in the format {rl.tool_parser_format}" if tools and rl.tool_parser_format else ""
    limit = f", {rl.max_tool_calls} calls at most" if tools and rl.max_tool_calls else ""
    turns = "as many turns as fit" if rl.max_turns is None else f"at most {rl.max_turns} turns"
    one = cfg.generate_config.sampling_config.max_tokens
    conversation = (
        f"{loop}{f' {by}' if by else ''}{tools}{calls}{limit}: {turns} of up to {one} tokens, "
        f"{cfg.response_limit} tokens after the prompt together"
    )
    return "; ".join([conversation, *phrases])


# ---------------------------------------------------------------------- devices, phases and groups


class _Phase(TypedDict):
    phase: str
    devices: str
    holds: str


def _list_parallel_groups(layout: Layout, tp_pp_dp: bool = False) -> dict[str, list[list[int]]]:
    """Return the ranks of every tensor, context, data and pipeline parallel group.

    Ranks count tensor first, then context, data and pipeline (Megatron's tp-cp-dp-pp); with `tp_pp_dp` data comes last.

    Raises:
        ValueError: the devices do not divide into replicas.
    """
    if layout.num_npus % layout.replica_size:
        raise ValueError(f"{layout.num_npus} devices do not divide into replicas of {layout.replica_size}")
    sizes = {"tp": layout.tensor, "cp": layout.context, "dp": layout.num_npus // layout.replica_size, "pp": layout.pipeline}
    order = ("tp", "cp", "pp", "dp") if tp_pp_dp else ("tp", "cp", "dp", "pp")
    strides, stride = {}, 1
    for axis in order:
        strides[axis] = stride
        stride *= sizes[axis]
    groups: dict[str, list[list[int]]] = {}
    for axis in ("tp", "cp", "dp", "pp"):
        starts = [rank for rank in range(layout.num_npus) if rank // strides[axis] % sizes[axis] == 0]
        groups[axis] = [[start + step * strides[axis] for step in range(sizes[axis])] for start in starts]
    return groups


def _list_expert_groups(layout: Layout, role: MegatronConfig) -> list[list[int]]:
    """Return the ranks over which the experts of one layer are spread; empty without expert parallelism.

    Inside a pipeline stage ranks count expert-tensor first, then expert; only for the rank order tp-cp-dp-pp.
    """
    size, inner = role.expert_sizes
    stage = layout.num_npus // layout.pipeline
    if role.num_experts is None or size <= 1 or role.use_tp_pp_dp_mapping or stage % (size * inner):
        return []
    starts = [rank for rank in range(layout.num_npus) if rank // inner % size == 0]
    return [[start + step * inner for step in range(size)] for start in starts]


def _describe_resources(run: Run, sizes: Sizes) -> dict[str, object]:
    """Return devices, phases and parallel groups of a run; groups only where the devices divide into replicas."""
    cfg, actor, engines, num_devices = run.config, sizes.actor, run.placement.engines, run.placement.num_devices
    shares_experts = engines is not None and engines.expert_ranks > 1
    roles = {"actor": _describe_role(actor, cfg.with_shape("actor_config"))}
    for role in ("ref", "reward", "critic", "teacher"):
        layout = getattr(sizes, role)
        if layout is not None:
            roles[role] = _describe_role(layout, cfg.with_shape(f"{role}_config"))
    threads = run.threads
    groups: dict[str, list[list[int]]] = {}
    if actor.num_npus % actor.replica_size == 0 and Range.DEVICES.contain(actor.num_npus):
        groups |= _list_parallel_groups(actor, cfg.actor_config.use_tp_pp_dp_mapping)
        if experts := _list_expert_groups(actor, cfg.with_shape("actor_config")):
            groups["ep"] = experts
    if sizes.counting != "samples":
        roles["rollout"] = {
            "devices": sizes.rollout.num_npus,
            "replicas": round_number(sizes.rollout.dp_size),
            "infer_tensor_parallel_size": sizes.rollout.tensor,
        }
        if engines is not None and shares_experts:
            roles["rollout"] |= {"replicas_sharing_experts": engines.sharing, "ep": engines.expert_ranks}
        if sizes.rollout.num_npus % sizes.rollout.replica_size == 0 and Range.DEVICES.contain(sizes.rollout.num_npus):
            groups["rollout"] = _list_parallel_groups(sizes.rollout)["tp"]
            if engines is not None and shares_experts and not engines.world_size % engines.expert_ranks:
                groups["rollout_ep"] = engines.expert_groups()
    return {
        "platform": cfg.platform,
        "num_devices": num_devices,
        "num_nodes": sizes.num_nodes,
        "devices_per_node": round_number(num_devices / sizes.num_nodes),
        "roles": roles,
        "phases": _list_phases(run, sizes),
        **({"parallel_groups": groups} if groups else {}),
        **({} if threads is None else {"threads": threads.count, "threads_reason": threads.reason}),
    }


def _describe_role(layout: Layout, role: MegatronConfig) -> dict[str, object]:
    summary: dict[str, object] = {"devices": layout.num_npus, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    summary |= {"dp": round_number(layout.dp_size)}
    if role.num_experts is not None:
        summary["ep"] = role.expert_model_parallel_size
    return summary


def _list_phases(run: Run, sizes: Sizes) -> list[_Phase]:
    """Return the phases of one iteration in order, each with its devices and their contents."""
    cfg = run.config
    shared = f"0-{sizes.actor.num_npus - 1}" if sizes.actor.num_npus > 1 else "0"
    actor, phases = _engine(sizes.actor), list[_Phase]()

    def add(phase: str, devices: str, holds: str) -> None:
        phases.append({"phase": phase, "devices": devices, "holds": holds})

    if cfg.rl_config is None or run.objective is None:
        add("train", shared, f"{cfg.stage} on Megatron {actor}")
        return phases
    rl, generate, objective = cfg.rl_config, cfg.generate_config, run.objective
    engines, servers = run.placement.engines, run.placement.servers
    dedicated = {role: f"{count} dedicated" for role, count in run.placement.dedicated.items() if count is not None}
    critic = sizes.critic if objective.has_critic else None
    critics = dedicated.get("critic", shared)
    parts = ("optimizer", "grad", "param")
    on_device = [] if generate is None else [part for part in parts if not getattr(generate, f"offload_train_{part}")]
    training = f", next to training {', '.join(on_device)}" if on_device else ", training state off the device"
    count, tensor = round_number(sizes.rollout.dp_size), sizes.rollout.tensor
    ranks = 1 if engines is None else engines.expert_ranks
    spread = f", experts over {ranks} devices (EP{ranks})" if ranks > 1 else ""
    generators = f"{len(servers)} standalone server(s)" if servers else dedicated.get("rollout", shared)
    # engines on dedicated devices hold no training state
    training = training if generators == shared else ""
    add("generate", generators, f"{count} rollout engine(s) TP{tensor}{spread}{training}")
    scorers = [", ".join(rl.verifier_function)] if rl.rule_reward else []
    if rl.judge_url is not None:
        scorers.append("the judge")
    if scorers:
        workers = rl.num_reward_workers or rl.verifier_parallel
        add("rewards", "host", f"{' and '.join(scorers)} in {workers} process(es)")
    if "greedy_baseline" in objective.needs:
        add("greedy_baselines", generators, f"{count} rollout engine(s) TP{tensor}")
    if cfg.reward_config is not None or rl.reward_model is not None:
        model = _engine(sizes.reward or sizes.actor)
        add("reward_model", dedicated.get("reward", shared), f"reward model on Megatron {model}")
    if (judge := run.placement.layouts.get("judge")) is not None:
        holds = f"{judge.num_npus // judge.tensor} engine(s) TP{judge.tensor} of the judge {rl.served_judge}"
        turns = "" if judge.dedicated else ", off the device in other phases"
        add("judge", dedicated.get("judge", shared), f"{holds}, replies of up to {rl.judge_max_tokens} tokens{turns}")
    if objective.needs_reference:
        weights = "the actor with adapters off" if rl.share_backbone else "reference weights"
        holds = f"{weights} on Megatron {_engine(sizes.ref or sizes.actor)}"
        add("ref_log_probs", dedicated.get("ref", shared), holds)
    if objective.distillation is not None:
        add("teacher_log_probs", *_describe_teachers(objective.distillation, sizes, dedicated.get("teacher", shared)))
    if objective.needs_old_log_probs(on_policy=sizes.on_policy):
        add("old_log_probs", shared, f"actor on Megatron {actor}")
    if critic is not None:
        add("values", critics, f"critic on Megatron {_engine(critic)}")
    add("advantages", "host", rl.adv_estimator)
    if critic is not None:
        add("update_critic", critics, f"critic on Megatron {_engine(critic)}")
    add("update_actor", shared, f"actor weights, gradients, optimizer on Megatron {actor}")
    if rl.sync_ref_model and objective.needs_reference:
        part = f"{rl.ref_model_mixup_alpha:g} of the actor"
        add("sync_reference", shared, f"{part} enters the reference every {rl.ref_model_sync_steps} iteration(s)")
    add("update_weights", shared, f"resharding {actor} -> TP{tensor} x {count}{spread}")
    return phases


def _describe_teachers(term: Distillation, sizes: Sizes, devices: str) -> tuple[str, str]:
    """Return devices and contents of the phase in which teachers judge tokens."""
    if any("://" in teacher for teacher in term.teachers):
        return "servers", f"{len(term.teachers)} teacher(s): {', '.join(term.teachers)}"
    roles = [teacher for teacher in term.teachers if teacher in ROLE_TEACHERS]
    models = len(term.teachers) - len(roles)
    parts = [f"{models} teacher(s) in turn on Megatron {_engine(sizes.teacher or sizes.actor)}"] if models else []
    return devices, " and ".join([*parts, *(f"the {role} as a teacher" for role in roles)])


def _engine(layout: Layout) -> str:
    context = f" CP{layout.context}" if layout.context > 1 else ""
    return f"TP{layout.tensor} PP{layout.pipeline}{context} DP{round_number(layout.dp_size)}"

"""The plan of a run as a report and as text, before any device is claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from mindspeed_rl.catalogue.objective import ROLE_TEACHERS, Distillation, Objective
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import Range
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import Sizes, batch_table, round_number
from mindspeed_rl.run.divisions import list_moved_keys, moves_devices
from mindspeed_rl.run.explain.effects import (
    describe_learning_rate,
    find_changed_keys,
    find_keys_without_effect,
    find_warnings,
)
from mindspeed_rl.run.explain.server_page import LOOP_PARTS, describe_server
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.placement import Layout
from mindspeed_rl.run.rules.validation import missing_for_training, unavailable, validate

#: the report of `explain`, which `mindspeed-rl explain --json` prints
Report = dict[str, Any]
_LISTED_GROUPS = 4


def explain(run: Run) -> Report:
    """Return all that follows from a run file.

    Keys: `valid`; `errors` (sentences) and `violations` (the same with separate keys and suggestions); `batch`;
    `dispatch_sizes`; `resources`; `formula`; `promise` (lines of memory, seconds and costs); `server` (what a server offers,
    which has no loop); `overview` and `data` (cards of run and data), `length` (of a run in passes over its prompts) and
    `unchecked`, which the command fills in; `samples` (of several turns, and drafts); `learning_rate`; `derived` (keys that
    the file omits and that follow from it, each with its value and source); `earlier_names` (keys by deprecated names);
    `warnings` (settings that cost time or results); `changed_keys`; `keys_without_effect`; `unavailable` (switched on, but not
    in this version) and `missing` (needed to start).
    Numbers that are not whole are shown as fractions, so that an invalid plan can be read too.
    """
    cfg, sizes, violations = run.config, run.sizes, validate(run)
    # all tables divide by these numbers; the errors name those below 1
    if sizes is not None and not sizes.can_divide:
        sizes = None
    rollout = None if sizes is None or sizes.counting == "samples" else sizes
    server = describe_server(run)
    report = {
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
            "language_model_only": cfg.actor_config.language_model_only,
            "platform": cfg.platform,
        },
        "batch": {} if sizes is None else batch_table(sizes, cfg.actor_config.train_iters),
        "dispatch_sizes": (
            {} if rollout is None else {name: round_number(size) for name, size in rollout.dispatch_sizes().items()}
        ),
        "resources": {} if sizes is None else _describe_resources(run, sizes),
        "formula": formula(run),
        "promise": [],
        "overview": {},
        "server": server,
        "data": "",
        "length": "",
        "unchecked": "",
        "samples": _describe_samples(run),
        "learning_rate": describe_learning_rate(cfg),
        "derived": {name: {"value": item.value, "from": item.source} for name, item in cfg.derived.items()},
        "earlier_names": {name: note for name, note in cfg.deprecated.items() if note.startswith("read as ")},
        "warnings": find_warnings(run),
        "changed_keys": find_changed_keys(cfg),
        "keys_without_effect": find_keys_without_effect(run),
        "unavailable": unavailable(run),
        "missing": missing_for_training(run),
    }
    return report | LOOP_PARTS if server else report


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
        "promise": [],
        "overview": {},
        "server": {},
        "data": "",
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
        kind = "server" if report["server"] else f"stage {run['stage']}"
        model += "without its vision tower, " if run["language_model_only"] else ""
        parts.append(f"{run['config_name']}: {kind}, {model}platform {run['platform']}")
    for key, (title, show) in _SECTIONS.items():
        if report[key]:
            parts.append("\n".join([*([title] if title else []), show(report[key])]))
    if report["valid"]:
        reasons = ["training refuses to start"] if report["unavailable"] else []
        reasons += [f"{len(report['missing'])} key(s) are still needed"] if report["missing"] else []
        parts.append(f"not ready: {' and '.join(reasons)}; see above" if reasons else "valid")
    return "\n\n".join(parts)


def _render_batch(batch: Mapping[str, object]) -> str:
    numbers = dict(batch)
    unit = _UNITS[str(numbers.pop("counting"))]
    return f"Batch; global_batch_size counts {unit}\n{_table(numbers)}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _list_lines(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _list_items(lines: list[str]) -> str:
    return "\n".join(f"  - {line}" for line in lines)


def _render_derived(derived: Mapping[str, Mapping[str, object]]) -> str:
    return _table({name: f"{_cell(item['value'])}  from {item['from']}" for name, item in derived.items()})


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


#: part of the report -> its title and its text, in the order of the page
_SECTIONS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "overview": ("", lambda rows: _table({name: text for name, text in rows.items() if text})),
    "promise": ("Promise", _list_lines),
    "server": ("", _table),
    "data": ("Data", _indent),
    "batch": ("", _render_batch),
    "dispatch_sizes": ("Rows that leave the data plane at once", _table),
    "resources": ("", _render_resources),
    "formula": ("Objective", _indent),
    "length": ("Length", _indent),
    "samples": ("Samples", _indent),
    "learning_rate": ("Learning rate", _indent),
    "derived": ("Derived: keys that are not written", _render_derived),
    "changed_keys": ("Keys that differ from their defaults", _table),
    "keys_without_effect": ("Keys that are set but have no effect in this run", _table),
    "unavailable": ("Training refuses to start", _list_lines),
    "missing": ("Still needed to start training", _list_lines),
    "earlier_names": ("Keys by names of earlier releases", _table),
    "warnings": ("Warnings", _list_items),
    "unchecked": ("Not checked", _indent),
    "errors": ("INVALID", _list_items),
}


def _shorten_groups(groups: list[list[int]]) -> str:
    """Return groups of ranks as text, the first few of many."""
    listed: list[list[int | str]] = [[*group] if len(group) <= 8 else [*group[:3], "...", group[-1]] for group in groups]
    text = " ".join("[" + " ".join(str(rank) for rank in group) + "]" for group in listed[:_LISTED_GROUPS])
    others = len(groups) - _LISTED_GROUPS
    return f"{text} and {others} more" if others > 0 else text


def _describe_samples(run: Run) -> str:
    """Return phrases about turns, spare samples, drafts, quantized matrices and exact log-probs; empty where there is none."""
    if run.config.rl_config is None or run.config.generate_config is None:
        return ""
    rl, generate, phrases = run.rl, run.generate, list[str]()
    if rl.agent_loop_name != "single_turn":
        phrases.append(_describe_conversation(run))
    if rl.spare_samples_per_prompt:
        fate = "continue in its second group" if rl.keep_spare_samples else "are aborted"
        phrases.append(f"{rl.spare_samples_per_prompt} spare samples of each prompt: the unfinished ones {fate}")
    if generate.drafts is not None:
        phrases.append(_describe_drafts(generate.drafts, run.config.platform))
    if generate.quantization is not None:
        mode = rl.rollout_importance_sampling_mode or "none, and the difference of the two policies stays in the update"
        sizes = QUANTIZED_FORMATS[find_format(generate.quantization, run.config.platform)]
        emulated = sizes.is_emulated and run.config.platform in ("cpu", "auto")
        slow = " (emulated in float32: slow, and no memory is saved)" if emulated else ""
        if run.config.platform == "npu" and sizes.npu_devices:
            slow = f" (which only {sizes.npu_devices} has)"
        if sizes.others is not None:
            slow = f" (experts: {sizes.weights}; all others in {sizes.others})"
        ranks = generate.infer_tensor_parallel_size
        own = f", with scales of a token on each of {ranks} ranks" if generate.quantization == "int8" and ranks > 1 else ""
        phrases.append(f"the engine's matrices are in {generate.quantization}{slow}{own}, corrected by {mode}")
    if rl.exact_log_probs:
        count = run.config.exact_slices
        slices = f", with sums over ranks in {count} slices" if count > 1 else ""
        phrases.append(f"log-probs of trainer and rollout engine are equal bit for bit{slices}")
    return "; ".join(phrases)


def _describe_drafts(drafts: Mapping[str, object], platform: str) -> str:
    source = f" of {drafts['model']}" if drafts.get("model") else ""
    same = "responses are those without drafts, token by token"
    if platform in ("npu", "cuda"):
        same = "the distribution of responses stays, but the same seed gives other tokens"
    limit = f"{drafts.get('num_speculative_tokens')} tokens a step at most"
    return f"drafts by {drafts.get('method')}{source}, {limit}: {same}"


def _describe_conversation(run: Run) -> str:
    """Return the loop of a sample of several turns, its tools, and the limits of its turns."""
    rl, loop = run.rl, run.rl.agent_loop_name
    program = None if rl.agent is None else rl.agent.url or " ".join(rl.agent.command)
    by = {"scheduler": rl.multi_turn_scheduler, "program": program}.get(loop)
    by = rl.environment if loop in ("environment", "roles") else by
    tools = "" if rl.tool_config_path is None else f", tools of {rl.tool_config_path}"
    calls = f" with calls in the format {rl.tool_parser_format}" if tools and rl.tool_parser_format else ""
    limit = f", {rl.max_tool_calls} calls at most" if tools and rl.max_tool_calls else ""
    adapters = ", ".join(f"{role} by {name}" for role, name in (rl.role_adapters or {}).items())
    tools += f", roles with their own adapters ({adapters})" if adapters else ""
    turns = "as many turns as fit" if rl.max_turns is None else f"at most {rl.max_turns} turns"
    per_turn = run.generate.sampling_config.max_tokens
    return (
        f"{loop}{f' {by}' if by else ''}{tools}{calls}{limit}: {turns} of up to {per_turn} tokens, "
        f"{run.config.response_limit} tokens after the prompt together"
    )


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
        if sizes.idle_rollout_replicas:
            roles["rollout"] |= {"idle_replicas": sizes.idle_rollout_replicas}
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


#: name of a phase, its devices and their contents
_Row = tuple[str, str, str]


def _list_phases(run: Run, sizes: Sizes) -> list[_Phase]:
    """Return the phases of one iteration in order, each with its devices and their contents."""
    shared = f"0-{sizes.actor.num_npus - 1}" if sizes.actor.num_npus > 1 else "0"
    dedicated = {role: f"{count} dedicated" for role, count in run.placement.dedicated.items() if count is not None}
    rows: list[_Row] = [("train", shared, f"{run.config.stage} on Megatron {_engine(sizes.actor)}")]
    if run.config.rl_config is not None and run.objective is not None:
        rows = [
            *_list_rollout_phases(run, run.objective, sizes, shared, dedicated),
            *_list_update_phases(run, run.objective, sizes, shared, dedicated),
        ]
    return [{"phase": phase, "devices": devices, "holds": holds} for phase, devices, holds in rows]


def _list_rollout_phases(
    run: Run, objective: Objective, sizes: Sizes, shared: str, dedicated: Mapping[str, str]
) -> Iterator[_Row]:
    """Yield the phases in which responses are generated and scored."""
    cfg, rl, servers = run.config, run.rl, run.placement.servers
    generators = f"{len(servers)} standalone server(s)" if servers else dedicated.get("rollout", shared)
    idle = f", {sizes.idle_rollout_replicas} of them idle" if sizes.idle_rollout_replicas else ""
    engines = f"{round_number(sizes.rollout.dp_size)} rollout engine(s) TP{sizes.rollout.tensor}{idle}"
    # engines on dedicated devices hold no training state
    training = _describe_training_state(cfg.generate_config) if generators == shared else ""
    yield "generate", generators, f"{engines}{_describe_spread(run)}{training}"
    if rl.elastic_rollout:
        prompts, count = sizes.train_samples / sizes.group_size, round_number(sizes.actor.num_npus / sizes.rollout.tensor)
        low, high = (round_number(mark * prompts) for mark in (rl.elastic_rollout_low, rl.elastic_rollout_high))
        until = f"while an iteration waits with fewer than {low} prompts ready, until {high} are"
        state = _describe_training_state(cfg.generate_config)
        yield "generate_elastic", shared, f"{count} more rollout engine(s) TP{sizes.rollout.tensor}, {until}{state}"
    if moves_devices(run.config):
        actors, servers, _ = list_moved_keys(rl).values()
        full = f"{rl.elastic_training_high:g} iterations' prompts ready (mean of {rl.elastic_training_patience} iterations)"
        wait = f"{rl.elastic_training_wait:.0%}"
        back = f"they go back if training then waits for more than {wait} of the time without being faster"
        holds = f"with {full}: a resume with {actors} devices that train and {servers} that generate; {back}"
        yield "move_devices", f"{rl.elastic_training_devices} dedicated", holds
    scorers = [", ".join(rl.verifier_function)] if rl.rule_reward else []
    scorers += [] if rl.judge_url is None else [_describe_judges(rl)]
    if scorers:
        workers = rl.num_reward_workers or rl.verifier_parallel
        yield "rewards", "host", f"{' and '.join(scorers)} in {workers} process(es)"
    if "greedy_baseline" in objective.needs:
        yield "greedy_baselines", generators, engines
    if cfg.reward_config is not None or rl.reward_model is not None:
        model = _engine(sizes.reward or sizes.actor)
        yield "reward_model", dedicated.get("reward", shared), f"reward model on Megatron {model}"
    if (judge := run.placement.layouts.get("judge")) is not None:
        holds = f"{judge.num_npus // judge.tensor} engine(s) TP{judge.tensor} of the judge {rl.served_judge}"
        turns = "" if judge.dedicated else ", off the device in other phases"
        devices = dedicated.get("judge", shared)
        yield "judge", devices, f"{holds}, replies of up to {rl.judge_max_tokens} tokens{turns}"


def _describe_judges(rl: RLConfig) -> str:
    """Return the judges at addresses in words, with their votes where there are several."""
    count, votes = 1 + len(rl.judge_panel), rl.num_judge_votes
    return "the judge" if votes == 1 else f"{count} judge(s) with {votes} votes ({rl.judge_vote})"


def _list_update_phases(
    run: Run, objective: Objective, sizes: Sizes, shared: str, dedicated: Mapping[str, str]
) -> Iterator[_Row]:
    """Yield the phases of log-probs, advantages and updates."""
    rl, actor, rollout = run.rl, _engine(sizes.actor), sizes.rollout
    critic = sizes.critic if objective.has_critic else None
    if objective.needs_ref:
        weights = "the actor with adapters off" if rl.share_backbone else "reference weights"
        holds = f"{weights} on Megatron {_engine(sizes.ref or sizes.actor)}"
        yield "ref_log_probs", dedicated.get("ref", shared), holds
    if objective.distillation is not None:
        devices, holds = _describe_teachers(objective.distillation, sizes, dedicated.get("teacher", shared))
        yield "teacher_log_probs", devices, holds
    if share := objective.old_log_probs_share(on_policy=sizes.on_policy):
        part = f", {share:g} of the rows as a check" if objective.reads_rollout_policy else ""
        yield "old_log_probs", shared, f"actor on Megatron {actor}{part}"
    if critic is not None:
        yield "values", dedicated.get("critic", shared), f"critic on Megatron {_engine(critic)}"
    yield "advantages", "host", rl.adv_estimator
    if critic is not None:
        yield "update_critic", dedicated.get("critic", shared), f"critic on Megatron {_engine(critic)}"
    yield "update_actor", shared, f"actor weights, gradients, optimizer on Megatron {actor}"
    if rl.sync_ref_model and objective.needs_ref:
        part = f"{rl.ref_model_mixup_alpha:g} of the actor"
        yield "sync_reference", shared, f"{part} enters the reference every {rl.ref_model_sync_steps} iteration(s)"
    if rl.ema_decay:
        yield "average", "host", f"moving average of the actor's weights, decay {rl.ema_decay:g}, after each optimizer step"
    count = round_number(rollout.dp_size)
    yield "update_weights", shared, f"resharding {actor} -> TP{rollout.tensor} x {count}{_describe_spread(run)}"


def _describe_training_state(generate: GenerateConfig | None) -> str:
    """Return the parts of the training state that stay on the device next to the rollout engine."""
    parts = ("optimizer", "grad", "param")
    on_device = [] if generate is None else [part for part in parts if not getattr(generate, f"offload_train_{part}")]
    return f", next to training {', '.join(on_device)}" if on_device else ", training state off the device"


def _describe_spread(run: Run) -> str:
    """Return the devices over which the rollout engines spread the experts of a layer."""
    ranks = 1 if run.placement.engines is None else run.placement.engines.expert_ranks
    return f", experts over {ranks} devices (EP{ranks})" if ranks > 1 else ""


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

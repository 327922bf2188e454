"""The agent loop of a run file, with its tools, and its tasks: from rows of the data plane, or from prompts."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_rl import registry
from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.keys.deadlines import DEFAULTS
from mindspeed_rl.config.keys.rl import OpponentKeys
from mindspeed_rl.data.images import ImageReader, read_references
from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.data.templates import HF_TEMPLATE, PLAIN_TEMPLATE, choose_thinking, load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.dataplane.columns import Batch, objects
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, LoopSettings, SingleTurn, Task
from mindspeed_rl.rollout.opponents import choose_held_out_opponent, choose_opponent
from mindspeed_rl.rollout.requests import EvaluationSampling, Sampling, sample_seed
from mindspeed_rl.run import Run
from mindspeed_rl.tools.agent_program import check_program
from mindspeed_rl.tools.parsers import DEFAULT_PARSER, check_parser_name, make_parser
from mindspeed_rl.tools.tool_file import build_tools, read_tools
from mindspeed_rl.tools.toolbox import CallLimits, Toolbox
from mindspeed_rl.workers.responses import get_sampling_seed, read_image_rules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: columns of a data set that may change the tools of its row
_TOOL_COLUMNS = ("tools_kwargs", "tool_selection", "extra_info")

_Result = TypeVar("_Result")

#: columns of the data plane that a task is made of; a loop of one turn needs only the first
TASK_COLUMNS = ("prompt_ids", "labels", "extra")


def build_agents(run: Run, tokenizer: PreTrainedTokenizerBase) -> AgentRunner:
    """Build the runner that makes the samples of this run, in this process. Nothing is started yet.

    Raises:
        ValueError: a key of the loop, of its tools or of its plug-in is wrong.
    """
    registry.search_folders(run.config.plugin_folders)
    rl = run.rl
    name = rl.agent_loop_name
    if name == "single_turn":
        return AgentRunner(SingleTurn())
    rules = read_image_rules(run.models["actor"]) if run.config.reads_images else None
    images = None if rules is None else ImageReader.build(rules, tokenizer)
    turns = _build_chat_turns(run, tokenizer, images)
    toolbox = None if rl.tool_config_path is None else build_toolbox(rl, tokenizer, turns)
    settings = LoopSettings(
        tokenizer=tokenizer,
        turns=turns,
        limits=TrajectoryLimits(run.config.response_limit, rl.max_prompt_length, run.generate.max_model_len, rl.max_turns),
        toolbox=toolbox,
        multi_turn_scheduler=rl.multi_turn_scheduler,
        external_plugins=tuple(rl.external_plugins),
        environment=rl.environment,
        opponent_roles=tuple(rl.opponents.roles),
        role_adapters=rl.engine_adapters,
        agent=rl.agent,
        folders=tuple(map(str, run.config.plugin_folders)),
        tool_parser=choose_parser(rl, turns),
        images=images,
        max_images=run.generate.limit_mm_image_per_prompt,
        max_videos=run.generate.limit_mm_video_per_prompt,
        vocab_size=run.models["actor"].plan.model_config.vocab_size,
    )
    return AgentRunner(load_agent_loop(name)(settings), toolbox)


def build_toolbox(rl: RLConfig, tokenizer: PreTrainedTokenizerBase, turns: ChatTurns | None = None) -> Toolbox:
    """Build the tools of `tool_config_path`. Nothing is started yet.

    Args:
        rl: the group of the run file.
        tokenizer: counts the tokens of responses.
        turns: turns of the chat template, whose format of calls is read where no parser is named; None where no call is read.

    Raises:
        ValueError: the file, or the name of the parser, is wrong.
    """
    assert rl.tool_config_path is not None
    name = choose_parser(rl, turns)
    thinks = turns is not None and turns.opens_thought
    limits = CallLimits(
        rl.max_tool_calls,
        rl.max_parallel_calls,
        rl.max_tool_response_length,
        rl.tool_response_truncate_side or "middle",
        rl.max_tool_response_characters,
    )
    return Toolbox(
        build_tools(read_tools(rl.tool_config_path, rl.deadlines.tool or DEFAULTS["tool"])),
        lambda schemas: make_parser(name, schemas, tokenizer, thinks=thinks),
        limits,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )


def choose_parser(rl: RLConfig, turns: ChatTurns | None) -> str:
    """Return the parser of the model's calls: the run file's, else the chat template's.

    Raises:
        ValueError: the name is certainly wrong.
    """
    name = rl.tool_parser_format or (None if turns is None else turns.tool_format) or DEFAULT_PARSER
    check_parser_name(name)
    return name


def check_agents(run: Run, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
    """Check what the first rollout needs: loop, plug-ins, chat template, the end of prompts.

    Args:
        run: the resolved run.
        tokenizer: tokenizer of the actor.
        prompt_ids: token ids of a prompt of the data set.

    Raises:
        ValueError: one of them is wrong; it is named.
    """
    agents = build_agents(run, tokenizer)
    loop = run.rl.agent_loop_name
    if loop == "single_turn":
        return
    turns = _build_chat_turns(run, tokenizer)
    if run.rl.agent is not None:
        check_program(run.rl.agent)
    if loop in ("environment", "program"):

        async def start_and_close() -> None:
            try:
                await agents.start()
            finally:
                await agents.close()

        # a program that does not load raises here
        asyncio.run(start_and_close())
    else:  # an environment may start with messages of its own
        turns.check_prompt(prompt_ids)
    role = "tool" if run.rl.tool_config_path is not None else "user"
    # a template that cannot write such a turn raises here
    turns.render_next([{"role": role, "content": "0"}], tokenizer.eos_token_id)


def check_tool_columns(rl: RLConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> None:
    """Check the columns of the rows that name tools, where there are any.

    Raises:
        ValueError: a row names a tool, an option or an argument that does not exist; with its place, and those that do.
    """
    columns = set(prompts[0]["columns"])  # as in all rows
    if rl.tool_config_path is None or not rl.multi_turn_enable or columns.isdisjoint(_TOOL_COLUMNS):
        return

    async def check(toolbox: Toolbox) -> None:
        for index in range(len(prompts)):
            try:
                toolbox.read_row(prompts[index]["columns"])
            except ValueError as error:
                raise ValueError(f"{prompts.where(index)}: {error}") from error

    _run_with_tools(rl, tokenizer, check)


def read_tool_schemas(rl: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the schemas of the tools for the prompts. The tools run for it: those on servers get their schemas from there.

    Raises:
        ValueError: a tool is wrong or cannot be started.
    """
    if rl.tool_config_path is None or not rl.multi_turn_enable:
        return []

    async def read(toolbox: Toolbox) -> list[dict[str, Any]]:
        tools = toolbox.open({})
        schemas = tools.schemas
        await tools.close()
        return schemas

    return _run_with_tools(rl, tokenizer, read)


def _run_with_tools(
    rl: RLConfig, tokenizer: PreTrainedTokenizerBase, work: Callable[[Toolbox], Coroutine[object, object, _Result]]
) -> _Result:
    """Return the result of the coroutine, during which the tools run."""

    async def run() -> _Result:
        toolbox = build_toolbox(rl, tokenizer)
        await toolbox.start()
        try:
            return await work(toolbox)
        finally:
            await toolbox.close()

    return asyncio.run(run())


def _build_chat_turns(run: Run, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None = None) -> ChatTurns:
    """Build the renderer of turns with the run's chat template.

    The template is the one of `prompt_type`, else the tokenizer's own, else the one of raw prompts.

    Args:
        run: the resolved run.
        tokenizer: tokenizer of the actor.
        images: image reader of a model of images.

    Raises:
        ValueError: the template does not exist.
    """
    actor = run.config.actor_config
    path = actor.prompt_type_path if actor.prompt_type_path and Path(actor.prompt_type_path).is_file() else None
    name = actor.prompt_type or (HF_TEMPLATE if tokenizer.chat_template else PLAIN_TEMPLATE)
    template = load_template(name, tokenizer, path=path, arguments=actor.chat_template_kwargs)
    thinking = choose_thinking(actor.enable_thinking, actor.chat_template_kwargs)
    has_tools = run.rl.tool_config_path is not None
    image, video = ("", "") if images is None else (images.marker, images.video_marker)
    return ChatTurns(template, tokenizer, thinking=thinking, has_tools=has_tools, image_marker=image, video_marker=video)


def list_task_columns(run: Run, agents: AgentRunner) -> list[str]:
    """Return the columns of the data plane that tasks of this run are made of: all where something reads the rows."""
    return list(TASK_COLUMNS if agents.loop.reads_rows or run.config.reads_images else TASK_COLUMNS[:1])


def build_row_tasks(
    run: Run, batch: Batch, rows: Sequence[int], rollout_index: int, sampling: Sampling, snapshots: Sequence[int] = ()
) -> list[Task]:
    """Return the tasks of rows of the data plane.

    Args:
        run: the resolved run.
        batch: has TASK_COLUMNS, or the first of them.
        rows: indexes at the data plane.
        rollout_index: index of the rollout in the run, a part of the seeds.
        sampling: sampling parameters of the responses.
        snapshots: versions of earlier weights that may play a role.
    """
    keys = run.rl.opponents
    group, seed = run.plan.n_samples_per_prompt, get_sampling_seed(run)
    labels = objects(batch["labels"]) if "labels" in batch else [None] * len(rows)
    extra = objects(batch["extra"]) if "extra" in batch else [{}] * len(rows)
    return [
        Task(
            tuple(ids.tolist()),
            replace(sampling, images=read_references(columns)),
            sample_seed(seed, rollout_index, row // group, row % group),
            label,
            columns,
            opponent=choose_opponent(keys, snapshots, f"{seed}/{rollout_index}/{row // group}/opponent") if snapshots else None,
        )
        for row, ids, label, columns in zip(rows, batch["prompt_ids"], labels, extra, strict=True)
    ]


class LengthOrder:
    """The order in which samples start: as they come, or the one whose response is expected to be the longest first.

    Expected is the mean length of the last responses to the prompt that were noted here. Samples without any start before the
    others, for they may be long. In an engine with fewer places than samples, this leaves the short ones for the end.
    """

    def __init__(self, *, longest_first: bool) -> None:
        self._longest_first = longest_first
        self._means: dict[int, float] = {}

    def arrange(self, tasks: Sequence[Task]) -> list[int]:
        """Return the indexes of the tasks in the order in which they start."""
        indexes = list(range(len(tasks)))
        if self._longest_first:
            # equal ones stay in order
            indexes.sort(key=lambda index: -self._means.get(hash(tasks[index].prompt_ids), math.inf))
        return indexes

    def note(self, tasks: Sequence[Task], lengths: Sequence[int]) -> None:
        """Take note of the lengths of the responses to these tasks, which have all samples of their prompts."""
        if not self._longest_first:
            return
        by_prompt: dict[int, list[int]] = {}  # by hash: prompts may be long
        for task, length in zip(tasks, lengths, strict=True):
            by_prompt.setdefault(hash(task.prompt_ids), []).append(length)
        self._means |= {prompt: statistics.fmean(values) for prompt, values in by_prompt.items()}


def build_item_tasks(
    items: Sequence[PromptItem],
    sampling: Sampling,
    seed: int,
    evaluation: EvaluationSampling,
    opponents: OpponentKeys | None = None,
    snapshots: Sequence[int] = (),
) -> list[Task]:
    """Return the tasks of an evaluation, a prompt's adjacent, with the seeds of `mindspeed-rl evaluate`.

    Args:
        opponents: keys of the opponents, where there are snapshots.
        snapshots: versions of earlier weights that may play a role.
    """
    sampling = evaluation.apply(sampling)
    return [
        Task(
            tuple(item["prompt_ids"]),
            replace(sampling, images=read_references(item["columns"])),
            sample_seed(seed, 0, index, sample),
            item["label"],
            item["columns"],
            opponent=choose_held_out_opponent(opponents, snapshots, index) if opponents is not None and snapshots else None,
        )
        for index, item in enumerate(items)
        for sample in range(evaluation.num_samples)
    ]

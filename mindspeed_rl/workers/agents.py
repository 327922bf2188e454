"""From rows of the data plane to the tasks of agent loops, and the loop that a run file asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.config import RLConfig, Run
from mindspeed_rl.config.keys.deadlines import DEFAULTS
from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.data.templates import HF_TEMPLATE, PLAIN_TEMPLATE, load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.dataplane.columns import Batch, objects
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, LoopSettings, SingleTurn, Task
from mindspeed_rl.rollout.requests import Sampling, sample_seed
from mindspeed_rl.tools.interface import ToolBox
from mindspeed_rl.tools.parsers import DEFAULT_PARSER, check_parser_name, make_parser
from mindspeed_rl.tools.tool_file import build_tools, read_tools
from mindspeed_rl.tools.toolbox import TOOL_COLUMNS, CallLimits, LoadedToolBox
from mindspeed_rl.workers.responses import sampling_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: columns of the data plane that a task is made of; a loop of one turn needs the first alone
TASK_COLUMNS = ("prompt_ids", "labels", "extra")


def make_agents(run: Run, tokenizer: PreTrainedTokenizerBase) -> AgentRunner:
    """Who makes the samples of this run, in this process. Nothing is started yet.

    Raises:
        ValueError: a key of the loop, of its tools or of its plug-in is wrong.
    """
    rl = run.rl
    name = rl.agent_loop_name
    if name == "single_turn":
        return AgentRunner(SingleTurn())
    turns = chat_turns(run, tokenizer)
    tool_box = None if rl.tool_config_path is None else make_tool_box(rl, tokenizer, turns)
    settings = LoopSettings(
        tokenizer=tokenizer,
        turns=turns,
        limits=TrajectoryLimits(run.config.response_limit, rl.max_prompt_length, run.generate.max_model_len, rl.max_turns),
        tool_box=tool_box,
        multi_turn_scheduler=rl.multi_turn_scheduler,
        environment=rl.environment,
        tool_parser=parser_name(rl, turns),
    )
    return AgentRunner(load_agent_loop(name)(settings), tool_box)


def make_tool_box(rl: RLConfig, tokenizer: PreTrainedTokenizerBase, turns: ChatTurns | None = None) -> ToolBox:
    """The tools of `tool_config_path`. Nothing is started yet.

    Args:
        turns: of the chat template, by which calls are read where no parser is named; None where nothing is to be read.

    Raises:
        ValueError: the file, or the name of the parser, is wrong.
    """
    assert rl.tool_config_path is not None
    name = parser_name(rl, turns)
    thinks = turns is not None and turns.opens_thought
    limits = CallLimits(
        rl.max_tool_calls, rl.max_parallel_calls, rl.max_tool_response_length, rl.tool_response_truncate_side or "middle"
    )
    return LoadedToolBox(
        build_tools(read_tools(rl.tool_config_path, rl.deadlines.tool or DEFAULTS["tool"])),
        lambda schemas: make_parser(name, schemas, tokenizer, thinks=thinks),
        limits,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )


def parser_name(rl: RLConfig, turns: ChatTurns | None) -> str:
    """How the model writes calls: as the run file says, else as the chat template does.

    Raises:
        ValueError: the name is surely wrong.
    """
    name = rl.tool_parser_format or (None if turns is None else turns.tool_format) or DEFAULT_PARSER
    check_parser_name(name)
    return name


def check_agents(run: Run, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
    """Looks for whatever would only be found out in the first rollout: loop, plug-ins, chat template, how prompts end.

    Args:
        prompt_ids: of a prompt of the data set.

    Raises:
        ValueError: names what is wrong.
    """
    agents = make_agents(run, tokenizer)
    loop = run.rl.agent_loop_name
    if loop == "single_turn":
        return
    if loop == "environment":
        asyncio.run(_started_and_ended(agents))  # a program that does not load
    turns = chat_turns(run, tokenizer)
    if loop != "environment":  # which may begin with messages of its own
        turns.check_prompt(prompt_ids)
    role = "tool" if run.rl.tool_config_path is not None else "user"
    # a template that cannot write such a turn raises here
    turns.between([{"role": role, "content": "0"}], tokenizer.eos_token_id)


async def _started_and_ended(agents: AgentRunner) -> None:
    try:
        await agents.start()
    finally:
        await agents.close()


def check_tool_columns(rl: RLConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> None:
    """Reads what the rows say of tools, where they say anything.

    Raises:
        ValueError: a row names a tool, an option or an argument that there is not; says where, and what there is.
    """
    columns = set(prompts[0]["columns"])  # as those of all rows
    if rl.tool_config_path is None or not rl.multi_turn_enable or columns.isdisjoint(TOOL_COLUMNS):
        return

    async def look() -> None:
        box = make_tool_box(rl, tokenizer)
        await box.start()
        try:
            for number in range(len(prompts)):
                try:
                    box.read_row(prompts[number]["columns"])
                except ValueError as error:
                    raise ValueError(f"{prompts.where(number)}: {error}") from error
        finally:
            await box.close()

    asyncio.run(look())


def tool_schemas(rl: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """What prompts tell the model of the tools. Starts them, which servers tell their schemas for, and ends them again.

    Raises:
        ValueError: a tool is wrong or cannot be started.
    """
    if rl.tool_config_path is None or not rl.multi_turn_enable:
        return []

    async def asked() -> list[dict[str, Any]]:
        box = make_tool_box(rl, tokenizer)
        await box.start()
        try:
            tools = box.open({})
            schemas = tools.schemas
            await tools.close()
            return schemas
        finally:
            await box.close()

    return asyncio.run(asked())


def chat_turns(run: Run, tokenizer: PreTrainedTokenizerBase) -> ChatTurns:
    """What the run's chat template writes between turns.

    It is the one of `prompt_type`, else the tokenizer's own, else what raw prompts without a template have.

    Raises:
        ValueError: there is no such template.
    """
    actor = run.config.actor_config
    path = actor.prompt_type_path if actor.prompt_type_path and Path(actor.prompt_type_path).is_file() else None
    name = actor.prompt_type or (HF_TEMPLATE if tokenizer.chat_template else PLAIN_TEMPLATE)
    template = load_template(name, tokenizer, path=path)
    thinking = "none" if actor.enable_thinking is None else "true" if actor.enable_thinking else "false"
    return ChatTurns(template, tokenizer, thinking=thinking, has_tools=run.rl.tool_config_path is not None)


def row_tasks(run: Run, batch: Batch, rows: Sequence[int], draw: int, sampling: Sampling) -> list[Task]:
    """The tasks of rows of the data plane.

    Args:
        batch: has TASK_COLUMNS, or the first of them.
        draw: number of the draw of prompts, a part of the seeds.
    """
    group, seed = run.plan.n_samples_per_prompt, sampling_seed(run)
    labels = objects(batch["labels"]) if "labels" in batch else [None] * len(rows)
    extra = objects(batch["extra"]) if "extra" in batch else [{}] * len(rows)
    return [
        Task(tuple(ids.tolist()), sampling, sample_seed(seed, draw, row // group, row % group), label, columns)
        for row, ids, label, columns in zip(rows, batch["prompt_ids"], labels, extra, strict=True)
    ]


def item_tasks(items: Sequence[PromptItem], sampling: Sampling, seed: int, *, greedy: bool) -> list[Task]:
    """One task a prompt, for evaluations; a prompt's seed is that of its number."""
    if greedy:
        sampling = Sampling(temperature=0.0, max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids)
    return [
        Task(tuple(item["prompt_ids"]), sampling, sample_seed(seed, number, 0, 0), item["label"], item["columns"])
        for number, item in enumerate(items)
    ]

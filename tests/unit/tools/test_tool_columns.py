"""Columns that configure tools are read before a run starts: one error, with row, tool, option and the valid names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from toolboxes import COUNTER_SCHEMA, open_toolbox, write_tool_file
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.config import RLConfig
from mindspeed_rl.data.prompts import open_prompts
from mindspeed_rl.workers.agents import check_tool_columns

TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.BPE(vocab={"<eos>": 0, "1": 1, "=": 2}, merges=[])), eos_token="<eos>", pad_token="<eos>"
)


class Shop:
    """A tool class that says which words it takes."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        pass

    def create(self, instance_id: str | None = None, stock: int = 0) -> str:
        return instance_id or "one"

    def execute(self, instance_id: str, parameters: dict[str, Any], discount: float = 0.0) -> str:
        return "sold"

    def release(self, instance_id: str) -> None:
        pass


SHOP = {"class_name": f"{__name__}:Shop", "tool_schema": COUNTER_SCHEMA}  # called count
ADD = {"function": "sample_tools:add"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"coumt": {}}, ["names the tool 'coumt'", "did you mean 'count'"]),
        ({"count": {"create_kwarg": {"stock": 1}}}, ["count: 'create_kwarg'", "did you mean 'create_kwargs'"]),
        (
            {"count": {"create_kwargs": {"stok": 1}}},
            ["count.create_kwargs", "'stok'; did you mean 'stock'"],
        ),
        ({"count": {"create_kwargs": [1]}}, ["count.create_kwargs must be a mapping of arguments, not '[1]'"]),
        ({"count": {"execute_kwargs": {"price": 1}}}, ["count.execute_kwargs", "'price'", "It takes discount"]),
        ({"count": {"calc_reward_kwargs": {"x": 1}}}, ["count: 'calc_reward_kwargs' is unknown or does nothing"]),
        ({"add": {"create_kwargs": {"x": 1}}}, ["add: 'create_kwargs' is unknown or does nothing", "It takes execute_kwargs"]),
        ({"add": {"execute_kwargs": {"c": 1}}}, ["add.execute_kwargs", "'c'", "It takes a, b"]),
        ({"calculator": {"execute_kwargs": {"c": 1}}}, ["calculator: 'execute_kwargs' is unknown or does nothing"]),
        ([1], ["tools_kwargs must be a mapping of tool to options"]),
    ],
)
def test_a_wrong_option_is_named_with_what_there_is(tmp_path: Path, said: Any, words: list[str]) -> None:
    async def run() -> None:
        async with open_toolbox(tmp_path, SHOP, ADD, "calculator") as box:
            box.read_row({"tools_kwargs": said})

    with pytest.raises(ValueError) as raised:
        asyncio.run(run())
    assert all(word in str(raised.value) for word in words), raised.value


def test_rows_as_verl_writes_them_are_read(tmp_path: Path) -> None:
    right = {
        "count": {"create_kwargs": {"stock": 3}, "execute_kwargs": {"discount": 0.5}, "calc_reward_kwargs": {}},
        "add": {"execute_kwargs": {"b": 1}},
        # nothing is created for a tool that is built in, whatever the row has for it
        "calculator": {"create_kwargs": {"ground_truth": "7"}, "execute_kwargs": {}},
    }

    async def run() -> Any:
        async with open_toolbox(tmp_path, SHOP, ADD, "calculator") as box:
            return box.read_row({"extra_info": json.dumps({"tools_kwargs": right, "index": 4})})

    options, chosen = asyncio.run(run())
    assert options == right and chosen == ["count", "add", "calculator"]


def test_a_run_is_refused_for_a_row_of_its_data(tmp_path: Path) -> None:
    rows = [{"prompt": "1=", "tools_kwargs": {"count": {"create_kwargs": {name: 1}}}} for name in ("stock", "stock", "stok")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rl = RLConfig(multi_turn_enable=True, tool_config_path=str(write_tool_file(tmp_path, SHOP)))

    def check(count: int) -> None:
        spelled = f"{data}#{count}"
        prompts = open_prompts(spelled, TOKENIZER, max_prompt_length=32, dataset_additional_keys=["tools_kwargs"])
        check_tool_columns(rl, TOKENIZER, prompts)

    check(2)
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 3: the column tools_kwargs, count\.create_kwargs: .*'stok'"):
        check(3)

"""What a run file says about prompts that were not preprocessed."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.run import Run
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.prompt_loader import load_prompts

CONFIGS = Path(__file__).parents[3] / "configs"
MAP_KEYS = "map_keys={prompt: question, query: '', response: answer}"


def _run(*keys: str) -> Run:
    overrides = ["dataset_additional_keys=[labels,level]", "prompt_type=empty", *keys]
    return resolve(load_run_config("grpo_tiny_cpu", CONFIGS, [f"actor_config.{text}" for text in overrides]), platform="cpu")


def open_prompts(tiny_model: Path, path: str, *keys: str) -> PromptDataset:
    run = _run(f"data_path='{path}'", "eval_data_path=null", *keys)
    return load_prompts(run, AutoTokenizer.from_pretrained(tiny_model))[0]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": "1+1=", "answer": "2", "level": 3}, {"answer": "4"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_columns_are_named_in_the_run_file(questions, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = open_prompts(tiny_model, questions, MAP_KEYS, "on_bad_row=skip")
    wanted = tokenizer("1+1=", add_special_tokens=False)["input_ids"]
    assert [prompts[0]] == [{"prompt_ids": wanted, "label": "2", "columns": {"level": 3}}] and len(prompts) == 1
    assert prompts.describe() == "1 prompts of 2 rows (0 too long, 1 malformed)"


def test_a_column_that_map_keys_names_as_the_answer_is_the_label_beside_other_columns(questions, tiny_model):
    prompts = open_prompts(tiny_model, questions, MAP_KEYS, "on_bad_row=skip", "dataset_additional_keys=[level]")
    assert prompts[0]["label"] == "2" and prompts[0]["columns"] == {"level": 3}
    keys = ("map_keys={prompt: question, query: ''}", "on_bad_row=skip", "dataset_additional_keys=[level]")
    assert open_prompts(tiny_model, questions, *keys)[0]["label"] is None


def test_split_holds_prompts_back_for_the_evaluations(tmp_path, tiny_model):
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps({"question": f"{number}+0=", "answer": str(number)}) + "\n" for number in range(10)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def labels(*keys: str) -> list[list[str | None]]:
        run = _run(MAP_KEYS, "dataset_additional_keys=[labels]", f"data_path={path}", "eval_data_path=null", *keys)
        parts = [part for part in load_prompts(run, tokenizer) if part is not None]
        return [[part[number]["label"] for number in range(len(part))] for part in parts]

    everything = [str(number) for number in range(10)]
    assert labels("split='100,0,0'") == [everything]
    assert labels("split='70,20,10'") == [everything[:7], everything[7:9]]
    assert labels("split='70,20,10'", f"eval_data_path={path}") == [everything[:7], everything]
    with pytest.raises(ValueError, match="split: no prompt of 10 is between the fractions 0.99 and 1"):
        labels("split='99,1,0'")


def test_a_malformed_row_stops_the_run_unless_it_is_to_be_skipped(questions, tiny_model):
    with pytest.raises(ValueError, match="questions.jsonl, row 2: has no column 'question'"):
        open_prompts(tiny_model, questions, MAP_KEYS)


def test_the_handler_is_named_in_the_run_file(questions, tiny_model):
    with pytest.raises(ValueError, match="handler_name='AlpacaStyleInstructionHandler' is not for prompts"):
        open_prompts(tiny_model, questions, "handler_name=AlpacaStyleInstructionHandler")


def test_thinking_needs_a_template_that_can(questions, tiny_model):
    with pytest.raises(ValueError, match="enable_thinking=true has no meaning for prompt_type='empty'"):
        open_prompts(tiny_model, questions, MAP_KEYS, "enable_thinking=true")


def test_an_unknown_column_name_is_refused():
    with pytest.raises(ConfigError, match="map_keys.promt.*'prompt'|map_keys.promt.*prompt"):
        _run("map_keys={promt: question}")


def test_a_data_set_of_the_hub_is_read_by_its_name_with_a_slice(tiny_model, tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options["split"]))
        return datasets.Dataset.from_list([{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(9)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)  # a folder of that name is not what hf:// says
    for path, labels in (
        ("hf://owner/name", [str(number) for number in range(1, 10)]),
        ("hf://owner/name[:2]", ["1", "2"]),
        ("hf://owner/name#3", ["1", "2", "3"]),
        ("hf://owner/name[7:]", ["8", "9"]),
    ):
        prompts = open_prompts(tiny_model, path, MAP_KEYS, "dataset_additional_keys=[labels]")
        assert [prompts[number]["label"] for number in range(len(prompts))] == labels
    assert set(asked) == {("owner/name", "train")}


def test_a_row_that_is_no_object_is_malformed(tmp_path, tiny_model):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1=", "answer": "2"}\n[1]\n"text"\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: is a list, not an object with columns: \[1\]"):
        open_prompts(tiny_model, str(path), MAP_KEYS, "dataset_additional_keys=[labels]")
    kept = open_prompts(tiny_model, str(path), MAP_KEYS, "dataset_additional_keys=[labels]", "on_bad_row=skip")
    assert (len(kept), kept.dropped) == (1, {"malformed": 2})

"""Mistakes of new users over one small task: what the command must say, or warn of, before anything is started."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.cli.main import main

ROWS = [{"question": f"{number % 10}{number % 7}", "answer": "1"} for number in range(40)]
REWARDS = """
from mindspeed_rl.rewards import register

@register("digits")
def digits(response: str, label: str) -> float:
    return 1.0

@register("of_nothing")
def of_nothing(labl: str) -> float:
    return 1.0

@register("of_a_column")
def of_a_column(response: str, difficulty: str) -> float:
    return 1.0

@register("of_all")
def of_all(completions, **columns):
    return [1.0 for _ in completions]
"""


def write_rows(path: str, rows: list[dict[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"megatron_training.data_path={path}"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with start/model, train.jsonl, heldout.jsonl, my_reward.py and own.yaml, all by relative paths."""
    folder = tmp_path_factory.mktemp("task")
    shutil.copytree(tiny_model, folder / "start" / "model")
    for name, rows in (("train", ROWS), ("heldout", ROWS[:8])):
        write_rows(str(folder / f"{name}.jsonl"), rows)
    (folder / "my_reward.py").write_text(REWARDS)
    tree: dict[str, Any] = {
        "platform": "cpu",
        "run_dir": "runs/own",
        "megatron_training": {
            "stage": "ray_grpo",
            "bf16": False,
            "tokenizer_name_or_path": "start/model",
            "data_path": "train.jsonl",
            "eval_data_path": "heldout.jsonl",
            "map_keys": {"prompt": "question", "query": "", "response": "answer"},
            "global_batch_size": 8,
            "train_iters": 3,
        },
        "actor_config": {
            "micro_batch_size": 8,
            "lr": 1e-4,
            "lr_decay_style": "constant",
            "finetune": True,
            "load": "start/model",
            "save": "result",
        },
        "rl_config": {
            "actor_resource": {"num_npus": 1},
            "n_samples_per_prompt": 4,
            "mini_batch_size": 8,
            "max_prompt_length": 16,
            "verifier_function": ["digits"],
            "external_plugins": ["my_reward.py"],
        },
        "generate_config": {"dtype": "float32", "max_model_len": 32, "sampling_config": {"max_tokens": 8}},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture
def here(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the task, the working directory of the test, without a network."""
    folder = tmp_path / "task"
    shutil.copytree(task, folder)
    monkeypatch.chdir(folder)
    for name in ("RAY_ADDRESS", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"https://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return folder


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def copy_model(**config: object) -> Path:
    folder = Path("other")
    shutil.copytree("start/model", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def other_vocabulary() -> list[str]:
    model = copy_model()
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {token: index + 5000 * (index > 3) for token, index in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))
    return [f"megatron_training.tokenizer_name_or_path={model}"]


def edited_config() -> list[str]:
    tokens = json.loads(Path("start/model/config.json").read_text())["vocab_size"]
    return [f"actor_config.load={copy_model(vocab_size=tokens - 8)}"]


def half_a_download() -> list[str]:
    model = copy_model()
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return [f"actor_config.load={model}"]


def without(name: str) -> Callable[[], list[str]]:
    def remove() -> list[str]:
        model = copy_model()
        (model / name).unlink()
        return [f"actor_config.load={model}"]

    return remove


def no_tokenizer() -> list[str]:
    model = copy_model()
    for file in [*model.glob("token*"), *model.glob("vocab*"), *model.glob("merges*")]:
        file.unlink()
    return [f"megatron_training.tokenizer_name_or_path={model}"]


def dangling_link() -> list[str]:
    os.symlink("/nowhere/model", "linked")
    return ["actor_config.load=linked"]


def separated(mark: str) -> Callable[[], list[str]]:
    def write() -> list[str]:
        lines = [f"question{mark}answer", *(f"{row['question']}{mark}{row['answer']}" for row in ROWS)]
        Path("rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
        return ["megatron_training.data_path=rows.csv"]

    return write


def rows(make: Callable[[int, dict[str, Any]], dict[str, Any]], count: int = len(ROWS)) -> Callable[[], list[str]]:
    return lambda: [write_rows("rows.jsonl", [make(index, row) for index, row in enumerate(ROWS[:count])])]


def keys(*changes: str) -> Callable[[], list[str]]:
    return lambda: list(changes)


#: mistake -> changes of the run file, and what the refusal must have
REFUSED: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "data of another name": (
        keys("megatron_training.data_path=trian.jsonl"), ["data_path='trian.jsonl'", "{here}/trian.jsonl", "'train.jsonl'?"]
    ),
    "held-out data of another name": (
        keys("megatron_training.eval_data_path=held.jsonl"), ["error: eval_data_path='held.jsonl'", "'heldout.jsonl'?"]
    ),
    "model of another name": (
        keys("actor_config.load=start/modle"),
        ["actor_config.load: 'start/modle' does not exist", "relative to {here}", "did you mean 'start/model'?"],
    ),
    "model in another folder": (keys("actor_config.load=strat/model"), ["did you mean 'start/model'?"]),
    "file as a model": (keys("actor_config.load=train.jsonl"), ["{here}/train.jsonl is a file"]),
    "link to nothing": (dangling_link, ["'linked' is a link to '/nowhere/model', which does not exist"]),
    "half a download": (half_a_download, ["{here}/other lacks 2 weight files", "such as model-00001", "mindspeed-rl download"]),
    "no weights": (without("model.safetensors"), ["{here}/other has config.json and no weights"]),
    "no config.json": (without("config.json"), ["{here}/other has weights and no config.json"]),
    "no tokenizer": (no_tokenizer, ["the folder holds none", "{here}/other has no tokenizer.json"]),
    "tokenizer of another name": (
        keys("megatron_training.tokenizer_name_or_path=./start/modle"), ["is not a folder", "did you mean 'start/model'?"]
    ),
    "tokenizer of another model": (other_vocabulary, ["train.jsonl, row 1: the tokenizer writes token 50"]),
    "tokenizer of another model, prompts too long": (
        lambda: [*other_vocabulary(), "rl_config.max_prompt_length=2"], ["the tokenizer writes token 50", "of the model"]
    ),
    "vocab_size that is not the weights'": (edited_config, ["{here}/other", "tokens, and vocab_size of its config.json is"]),
    "plug-in of another name": (
        keys("rl_config.external_plugins=[my_rewrad.py]"), ["there is no file 'my_rewrad.py'", "did you mean 'my_reward.py'?"]
    ),
    "parameter that nothing fills": (
        keys("rl_config.verifier_function=[of_nothing]"), ["'of_nothing' has the parameter 'labl'", "did you mean 'label'?"]
    ),
    "parameter of a column that is not there": (
        keys("rl_config.verifier_function=[of_a_column]"), ["'of_a_column' has the parameter 'difficulty'", "rows have label"]
    ),
    "no column of labels": (
        rows(lambda index, row: {"question": row["question"]}), ["response names the column 'answer'", "they have question"]
    ),
    "column of labels of another name": (
        rows(lambda index, row: {"question": row["question"], "anwser": "1"}), ["did you mean 'anwser'?"]
    ),
    "no labels for a reward that reads them": (
        lambda: [
            *rows(lambda index, row: {"question": row["question"]})(),
            "megatron_training.map_keys.response=null",
        ],
        ["'digits' has the parameter 'label'", "no label"],
    ),
    "an empty file": (rows(lambda index, row: row, 0), ["the data has no row at all"]),
    "only empty labels": (rows(lambda index, row: {**row, "answer": ""}), ["all 40 rows are left out (40 empty answer)"]),
    "only long prompts": (
        keys("rl_config.max_prompt_length=2"), ["40 of 40 rows", "they have 2 to", "set rl_config.max_prompt_length to"]
    ),
    "group of one": (keys("rl_config.n_samples_per_prompt=1"), ["must be at least 2", "group_norm"]),
    "GPU that is not there": (keys("platform=cuda"), ["platform: 'cuda' was requested", "platform: cpu is usable here"]),
    "NPU that is not there": (keys("platform=npu"), ["platform: 'npu' was requested", "mindspeed-rl doctor"]),
    "cache above the memory": (
        keys("generate_config.kv_cache_memory_gib=100000"), ["kv_cache_memory_gib: 100000 GiB x 1", "GiB for everything"]
    ),
    "disk of optimizer states that is not there": (
        keys("megatron_training.optimizer_offload_fraction=1", "megatron_training.optimizer_offload_path=/nowhere/at/all"),
        ["actor_config.optimizer_offload_path: /nowhere/at/all is no folder on this machine", "make it on a local disk"],
    ),
    "judge that is not there": (
        lambda: [f"rl_config.judge_url=http://127.0.0.1:{free_port()}/v1", "rl_config.judge_model=x"],
        ["rl_config.judge_url: http://127.0.0.1:", "cannot be reached", "start the server"],
    ),
    "name on a hub without a network": (
        keys("actor_config.load=Nobody/nothing-1b", "megatron_training.tokenizer_name_or_path=Nobody/nothing-1b"),
        ["'Nobody/nothing-1b' does not exist", "cannot be reached", "mindspeed-rl download Nobody/nothing-1b"],
    ),
}  # fmt: skip
#: mistake -> changes, and what the warnings of a valid run must have; none for what is right
ACCEPTED: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "nothing": (keys(), []),
    "semicolons of Excel": (separated(";"), []),
    "tabs": (separated("\t"), []),
    "commas": (separated(","), []),
    "function of all columns": (keys("rl_config.verifier_function=[of_all]"), []),
    "one row": (rows(lambda index, row: row, 1), ["1 prompts for rollouts of 8", "every prompt 8 times"]),
    "some empty labels": (
        rows(lambda index, row: {**row, "answer": "" if index % 4 else "1"}), ["30 of 40 rows are left out: 30 empty answer"]
    ),
    "labels of blanks": (rows(lambda index, row: {**row, "answer": "  "}), ["40 of 40 prompts have an empty label"]),
    "mostly long prompts": (
        rows(lambda index, row: {**row, "question": row["question"] * (20 if index % 4 else 1)}),
        ["30 of 40 rows are left out", "rl_config.max_prompt_length=41"],
    ),
    "more devices than cores": (
        keys(
            "rl_config.actor_resource.num_npus=128", "megatron_training.global_batch_size=128", "rl_config.mini_batch_size=128",
            "actor_config.micro_batch_size=4",
        ),
        ["128 devices are processes that share", "1 to 4 times"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *ACCEPTED])
def test_what_a_mistake_is_told(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = (REFUSED | ACCEPTED)[name]
    code = explain(["--config-name", "own.yaml", "--validate", *make()])
    output = capsys.readouterr().out
    assert code == (2 if name in REFUSED else 0), output
    assert output.startswith("error: " if name in REFUSED else "valid\n"), output
    for text in words:
        assert text.format(here=here) in output, output
    if name in ACCEPTED and not words:
        assert output == "valid\n"


def test_files_beside_the_run_file_are_found_from_another_folder(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert explain(["--config-name", str(here / "own.yaml"), "--validate"]) == 0
    # what is in the working directory comes first
    write_rows("train.jsonl", [{"other": "1"}])
    capsys.readouterr()
    assert explain(["--config-name", str(here / "own.yaml"), "--validate"]) == 2
    assert "they have other" in capsys.readouterr().out


SFT = ("sft_tiny_cpu", ["megatron_training.load=start/model", "megatron_training.tokenizer_name_or_path=start/model"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("nothing", ["does not exist", "give raw data"]),
        ("trian.jsonl", ["does not exist", "did you mean 'train.jsonl'"]),
    ],
)
def test_data_of_a_supervised_stage_that_cannot_be_read_is_named(
    data: str, words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [*SFT[1], f"megatron_training.data_path={data}", "model.tiny_qwen25.num_layers=null"]
    assert explain(["--config-name", SFT[0], "--validate", *changes]) == 2
    output = capsys.readouterr().out
    assert all(text in output for text in words), output


def finished_run() -> list[str]:
    Path("runs/own").mkdir(parents=True)
    Path("runs/own/report.json").write_text("{}")
    return ["doctor", "--hang", "runs/own"]


#: mistake -> command, and what it must say
COMMANDS: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "chat with a model of another name": (keys("chat", "--load", "start/modle"), ["did you mean 'start/model'?"]),
    "chat with a result that is not there": (
        keys("chat", "--load", "result/nothing"), ["'result/nothing' does not exist", "cannot be reached"]
    ),
    "generate without a prompt": (keys("generate", "--load", "start/model", "--prompt-type", "empty"), ["--prompt TEXT"]),
    "convert of a missing GGUF file": (
        keys("convert", "--load-dir", "a.gguf", "--save-model-type", "hf", "--save-dir", "out"), ["'a.gguf' does not exist"]
    ),
    "convert of a missing folder": (keys("convert", "--load-dir", "start/modle", "--save-dir", "out"), ["'start/model'?"]),
    "import of a missing script": (keys("import", "verl", "run_grpo.sh"), ["no script", "'run_grpo.sh' does not exist"]),
    "import with two mistakes": (
        keys("import", "trl", "trl grpo --model_name_or_path x --learnin_rate 1e-5"), ["learnin_rate", "names no data"]
    ),
    "map_keys that are not JSON": (
        keys("preprocess", "--input", "train.jsonl", "--map-keys", "{prompt: question}"), ["is not JSON", "double quotes"]
    ),
    "status of a run that has ended": (finished_run, ["this run has ended", "mindspeed-rl report runs/own"]),
    "status of no run": (keys("doctor", "--hang", "runs/onw"), ["'runs/onw' does not exist"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_wrong_command_is_told(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = COMMANDS[name]
    monkeypatch.setattr("sys.stdin", open(os.devnull))
    command = make()
    try:
        code = main(command)
    except SystemExit as error:
        code = error.code
    output = capsys.readouterr()
    text = output.out + output.err
    assert code == 2, text
    assert all(word in text for word in words), text
    assert "usage:" not in text or name.startswith("status"), text


def test_plan_without_a_kind_prints_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--config-name", "grpo_tiny_cpu"])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "GiB of a device by owner and phase" in output and "host work for a layer in a step of the engine" in output

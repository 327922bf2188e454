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
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.cli.main import main

ROWS = [{"question": f"{number % 10}{number % 7}", "answer": "1"} for number in range(40)]
HELD_OUT = [{"question": f"0{number}0", "answer": "1"} for number in range(8)]
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
    for name, rows in (("train", ROWS), ("heldout", HELD_OUT)):
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


#: sockets of `judged_by`, open to the end of the tests
LISTENING: list[socket.socket] = []


def listen() -> str:
    """Return the address of a judge that takes connections and never replies."""
    LISTENING.append(socket.create_server(("127.0.0.1", 0)))
    return f"http://127.0.0.1:{LISTENING[-1].getsockname()[1]}/v1"


def judged_by(prompt: str, content: str | None = None) -> Callable[[], list[str]]:
    """Return a maker of a judge that listens, whose prompt is in a file."""

    def write() -> list[str]:
        if content is not None:
            Path(prompt).write_text(content)
        return [f"rl_config.judge_url={listen()}", "rl_config.judge_model=x", f"rl_config.judge_prompt={prompt}"]

    return write


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


def added_tokens(*rows_of_data: dict[str, Any], **special: str) -> Callable[[], list[str]]:
    """A tokenizer with one token more than the model has rows, and data that may have it."""

    def add() -> list[str]:
        model = copy_model()
        tokenizer = AutoTokenizer.from_pretrained(model)
        rows_of_model = json.loads((model / "config.json").read_text())["vocab_size"]
        tokenizer.add_tokens([*(f"<{index}>" for index in range(len(tokenizer), rows_of_model)), "<new>"])
        for name, token in special.items():
            setattr(tokenizer, name, token)
        tokenizer.save_pretrained(model)
        data = [write_rows("rows.jsonl", list(rows_of_data))] if rows_of_data else []
        return [f"megatron_training.tokenizer_name_or_path={model}", *data]

    return add


def edited_config() -> list[str]:
    tokens = json.loads(Path("start/model/config.json").read_text())["vocab_size"]
    return [f"actor_config.load={copy_model(vocab_size=tokens - 8)}"]


def change_head(ties: bool, difference: float) -> Callable[[], list[str]]:
    """A model whose weights have a head that is the embedding's and so much more, where config.json ties it or not."""

    def change() -> list[str]:
        model = copy_model(tie_word_embeddings=ties)
        tensors = load_file(model / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        if difference:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + difference
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        return [f"actor_config.load={model}"]

    return change


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


def written(path: str, content: str | bytes, *changes: str) -> Callable[[], list[str]]:
    """Return a maker of a file; the data of the run where no change of the run file is given."""

    def write() -> list[str]:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(changes) or [f"megatron_training.data_path={path}"]

    return write


def model_file(name: str, content: str | bytes, *changes: str) -> Callable[[], list[str]]:
    """Return a maker of a model with another content of a file, which the run starts from."""

    def write() -> list[str]:
        (copy_model() / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["actor_config.load=other", *changes]

    return write


def cut_weights() -> list[str]:
    path = copy_model() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return ["actor_config.load=other"]


def pickled_weights() -> list[str]:
    model = copy_model()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return ["actor_config.load=other"]


def no_template() -> list[str]:
    path = copy_model() / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content.pop("chat_template", None)
    path.write_text(json.dumps(content))
    path.with_name("chat_template.jinja").unlink(missing_ok=True)
    return ["megatron_training.tokenizer_name_or_path=other", "megatron_training.prompt_type=hf"]


def scored_by(body: str, head: str = "") -> Callable[[], list[str]]:
    """Return a maker of a plug-in whose function `digits` has this body."""
    text = f"{head}\nfrom mindspeed_rl.rewards import register\n\n@register('digits')\n"
    return written("my_reward.py", f"{text}def digits(response: str, label: str):\n    {body}\n", "rl_config.rule_reward=true")


def held_out(rows: list[dict[str, Any]]) -> Callable[[], list[str]]:
    return lambda: [write_rows("other.jsonl", rows).replace(".data_path", ".eval_data_path")]


def edited(change: Callable[[str], str]) -> Callable[[], list[str]]:
    """Return a change of the run file's text."""

    def write() -> list[str]:
        path = Path("own.yaml")
        path.write_text(change(path.read_text()))
        return []

    return write


TEXT_ROWS = "".join(json.dumps({"question": "\u4f60", "answer": "1"}, ensure_ascii=False) + "\n" for _ in range(8))
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
DATA = "megatron_training.data_path="
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
    "tokenizer of another model": (
        other_vocabulary, ["tokenizer_name_or_path='other': the tokenizer has ", "start/model): it lacks", "such as 5004 ("]
    ),
    "tokenizer of another model, prompts too long": (
        lambda: [*other_vocabulary(), "rl_config.max_prompt_length=2"], ["tokens of text", "give the tokenizer of the model"]
    ),
    "tokenizer of another model, by transformers' modules": (
        lambda: [*other_vocabulary(), "megatron_training.engine=fsdp", "rl_config.use_prefix_grouper=false"],
        ["tokens of text, such as 5004 ("],
    ),
    "prompts with a token that was added to the tokenizer": (
        added_tokens(*ROWS[:8], {"question": "a<new>", "answer": "1"}), ["rows.jsonl, row 9: the tokenizer writes token"]
    ),
    "padding by a token that was added to the tokenizer": (
        added_tokens(pad_token="<new>"), ["its pad_token is token", "or another pad_token in its tokenizer_config.json"]
    ),
    "vocab_size that is not the weights'": (edited_config, ["{here}/other", "tokens, and vocab_size of its config.json is"]),
    "no head, and none that is tied": (
        change_head(False, 0.0), ["{here}/other has no lm_head.weight", "tie_word_embeddings of its config.json is false"]
    ),
    "a head that is not the embedding it is tied to": (
        change_head(True, 1.0), ["lm_head.weight differs from model.embed_tokens.weight, to which config.json ties it"]
    ),
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
        ["actor_config.optimizer_offload_path: /nowhere/at/all is not a folder on this machine", "make it on a local disk"],
    ),
    "judge that is not there": (
        lambda: [f"rl_config.judge_url=http://127.0.0.1:{free_port()}/v1", "rl_config.judge_model=x"],
        ["rl_config.judge_url: http://127.0.0.1:", "cannot be reached", "start the server"],
    ),
    "judge that never replies": (
        lambda: [f"rl_config.judge_url={listen()}", "rl_config.judge_model=x", "rl_config.judge_timeout_s=0.5"],
        ["rl_config.judge_url: the judge x gives no score for a response to the first row", "no reply in 0.5 s"],
    ),
    "judge of the audit that never replies": (
        lambda: [f"audit.judge_url={listen()}", "rl_config.judge_timeout_s=0.5"],
        ["audit.judge_url: the judge judge 1 gives no score", "no reply in 0.5 s"],
    ),
    "name on a hub without a network": (
        keys("actor_config.load=Nobody/nothing-1b", "megatron_training.tokenizer_name_or_path=Nobody/nothing-1b"),
        ["'Nobody/nothing-1b' does not exist", "cannot be reached", "mindspeed-rl download Nobody/nothing-1b"],
    ),
    # files that are something else
    "UTF-16": (written("rows.jsonl", TEXT_ROWS.encode("utf-16")), ["rows.jsonl, row 1: is UTF-16: save it as UTF-8"]),
    "UTF-16 of Excel": (written("rows.csv", "question,answer\n1,1\n".encode("utf-16")), ["'rows.csv' is UTF-16"]),
    "GBK": (written("rows.jsonl", TEXT_ROWS.encode("gbk")), ["row 1: is not UTF-8 (byte 0xc4): save the file as UTF-8"]),
    "Latin-1": (
        written("rows.csv", "question;answer\nGr\xfc\xdfe;1\n".encode("latin-1")), ["is not UTF-8 (byte 0xfc): save the file"]
    ),
    "a web page as data": (written("rows.jsonl", "<!DOCTYPE html><html>\n"), ["row 1: is a web page", "resolve"]),
    "a pointer as data": (written("rows.jsonl", LFS), ["row 1: is a pointer of Git LFS", "git lfs pull"]),
    "a pointer as weights": (model_file("model.safetensors", LFS), ["{here}/other/model.safetensors is a pointer of Git LFS"]),
    "a pointer as a tokenizer": (
        model_file("tokenizer.json", LFS, "megatron_training.tokenizer_name_or_path=other"), ["tokenizer.json is a pointer"]
    ),
    "an archive as data": (written("rows.xlsx", b"PK"), ["unknown format '.xlsx'", ".csv", "save the sheet as CSV"]),
    "half an archive": (written("rows.jsonl.gz", b"\x1f\x8b\x08\x00abc"), ["'rows.jsonl.gz' is damaged"]),
    "text as parquet": (written("rows.parquet", "hello"), ["'rows.parquet' is damaged"]),
    "texts in an array": (written("rows.json", '["a", "b"]'), ["row 1: is a str, not an object with columns"]),
    "all rows in an object": (
        written("rows.json", '{"train": [{"question": "1", "answer": "1"}, {"question": "2", "answer": "1"}]}'),
        ["column 'train' has 2 objects: are these the rows?", "one per line"],
    ),
    "a comma after each row": (
        written("rows.jsonl", '{"question": "1", "answer": "1"},\n' * 2), ["row 1: is not", "remove the comma after the row"]
    ),
    "rows as Python prints them": (
        written("rows.jsonl", f"{ROWS[0]}\n"), ["row 1: is not valid JSON", "single quotes, as Python prints them"]
    ),
    "a row of several lines": (
        written("rows.jsonl", json.dumps(ROWS[0], indent=2)), ["row 1: is not", "a row must be on one line (json.dumps)"]
    ),
    "a question that is an object": (
        rows(lambda index, row: {**row, "question": {"text": "1"}}), ["row 1: column 'question' must be text, not dict"]
    ),
    "columns that change": (
        rows(lambda index, row: row if index != 2 else {"prompt": "1", "answer": "1"}), ["row 3: has no column 'question'"]
    ),
    "an empty folder as data": (
        lambda: [os.mkdir("empty") or f"{DATA}empty"], ["input='empty' holds no .jsonl"]
    ),
    "the run file as data": (keys(f"{DATA}own.yaml"), ["unknown format '.yaml'; known: .jsonl"]),
    "one of two files": (
        keys(f"{DATA}'train.jsonl,nothing.jsonl'"), ["of the files with commas between them 'nothing.jsonl' does not exist"]
    ),
    "files in brackets": (keys(f"{DATA}'[train.jsonl, heldout.jsonl]'"), ["without brackets: train.jsonl,heldout.jsonl"]),
    "an address as data": (keys(f"{DATA}https://example.com/a.jsonl"), ["addresses are not read: download the file"]),
    "a hub with one slash": (keys(f"{DATA}hf:/openai/gsm8k"), ["did you mean 'hf://openai/gsm8k'?"]),
    "a row that is not JSON": (
        written("rows.jsonl", '{"question": "1", "answer": "1"}\n{question: 1}\n'), ["rows.jsonl, row 2: is not valid JSON"]
    ),
    "the folder of a model as data": (keys(f"{DATA}start/model"), ["row 1", "config.json"]),
    # rows
    "a column of another name": (
        keys("megatron_training.map_keys={prompt: questoin, query: '', response: answer}"), ["'questoin'", "question, answer"]
    ),
    "messages that map_keys does not name": (
        lambda: [
            write_rows("rows.jsonl", [{"messages": [{"role": "user", "content": "1"}]}] * 8), "megatron_training.map_keys=null",
        ],
        ["column 'messages' has chat messages", "map_keys: {{prompt: messages}}"],
    ),
    "only empty prompts": (rows(lambda index, row: {**row, "question": ""}), ["all 40 rows are left out (40 empty prompt)"]),
    "a slice after the end": (keys(f"{DATA}'train.jsonl[100:200]'"), ["selects no row: the data ends before row 100"]),
    "a column that is to be kept": (
        keys("megatron_training.dataset_additional_keys=[difficulty]"),
        ["row 1: has no column 'difficulty'", "question, answer"]
    ),
    "held-out data without the columns": (held_out([{"q": "1"}] * 4), ["error: megatron_training.eval_data_path: ", "have q;"]),
    "held-out data without rows": (held_out([]), ["error: megatron_training.eval_data_path: ", "has no row at all"]),
    "long held-out data": (
        held_out([{"question": "1" * 90, "answer": "1"}] * 4), ["error: megatron_training.eval_data_path: ", "4 of 4 rows"]
    ),
    # models
    "the folder above the model": (keys("actor_config.load=start"), ["{here}/start; did you mean 'start/model'?"]),
    "pickled weights": (pickled_weights, ["the weights pytorch_model.bin, which are pickled", "save_pretrained"]),
    "cut weights": (cut_weights, ["{here}/other/model.safetensors is truncated", "ends at byte"]),
    "empty weights": (model_file("model.safetensors", b""), ["is truncated: 0 bytes"]),
    "config.json that is not JSON": (model_file("config.json", "{"), ["other/config.json is not valid JSON"]),
    "config.json that is a list": (model_file("config.json", "[]"), ["holds list where a JSON object is expected"]),
    "an unknown architecture": (
        lambda: [f"actor_config.load={copy_model(architectures=['FooForCausalLM'])}"], ["'FooForCausalLM'", "not supported"]
    ),
    "more layers than weights": (
        lambda: [f"actor_config.load={copy_model(num_hidden_layers=40)}"],
        ["has no tensor of 'model.layers.", "num_hidden_layers 40"]
    ),
    "a size that is text": (
        lambda: [f"actor_config.load={copy_model(hidden_size='big')}"], ['hidden_size "big"', "a whole number"]
    ),
    "no chat template": (no_template, ["needs a tokenizer with a chat template", "chatml", "chat_template.jinja"]),
    "a path with backslashes": (keys(r"actor_config.load=start\model"), ["did you mean 'start/model'?", "Paths have /"]),
    "the file of a tokenizer": (
        keys("megatron_training.tokenizer_name_or_path=start/model/tokenizer.json"), ["is not a folder; give the folder"]
    ),
    "templates of another name": (
        keys("megatron_training.prompt_type=mine", "megatron_training.prompt_type_path=tempaltes.json"),
        ["prompt_type='mine' is not a built-in template", "'tempaltes.json' does not exist"],
    ),
    "a context beyond the model's": (
        keys("generate_config.max_model_len=100000"), ["must be at most", "the longest sequence of the model in start/model"]
    ),
    "a path in quotes": (keys("actor_config.load=\"'start/model'\""), ["does not exist", "relative to {here}"]),
    # rewards: what train would meet when it scores the first row
    "a reward that is text": (scored_by("return 'good'"), ["'digits' cannot score the first row", "it returned 'good'"]),
    "a reward that raises": (scored_by("return 1 / 0"), ["ZeroDivisionError: division by zero (my_reward.py:6)"]),
    "a reward that is not a number": (scored_by("return float('nan')"), ["it returned nan, which is not a finite number"]),
    "a reward that ends the process": (scored_by("import os; os._exit(3)"), ["ends the process with code 3"]),
    "a reward that exits": (scored_by("raise SystemExit(3)"), ["'digits' cannot score the first row", "SystemExit: 3"]),
    "rewards of another number": (
        written(
            "my_reward.py",
            "from mindspeed_rl.rewards import register\n@register('digits')\n"
            "def f(completions, **kwargs):\n    return [1.0] * 9\n",
            "rl_config.rule_reward=true",
        ),
        ["a list of 1 scores, one for each sample, not 9"],
    ),
    "a reward that is not registered": (
        written("my_reward.py", "def digits(response, label):\n    return 1.0\n", "rl_config.rule_reward=true"),
        ["'digits' is a function of my_reward.py that is not registered", '@register("digits")'],
    ),
    "a plug-in with a mistake": (written("my_reward.py", "def f(:\n", "rl_config.rule_reward=true"), ["line 1: SyntaxError"]),
    "a plug-in without its package": (
        scored_by("return 1.0", "import nothing_here"), ["line 1: there is no module 'nothing_here'"]
    ),
    "a function that the plug-in has not": (
        keys("rl_config.verifier_function=['my_reward:nothing']"), ["the module 'my_reward' has no 'nothing'"]
    ),
    "a folder as a plug-in": (keys("rl_config.external_plugins=[start]"), ["'start' is a folder", "name a Python file in it"]),
    "a judge's prompt of another name": (
        judged_by("own.yml"), ["rl_config.judge_prompt: there is no file 'own.yml'", "did you mean 'own.yaml'"]
    ),
    "a judge's prompt without the response": (judged_by("judge.txt", "Rate it: {prompt}"), ["judge_prompt", "{{response}}"]),
    "a reward of another name": (keys("rl_config.verifier_function=[digit]"), ["did you mean 'digits'?"]),
    "a judge without http": (
        keys("rl_config.judge_url=127.0.0.1:9", "rl_config.judge_model=x"), ["it must look like http://host:port/v1"]
    ),
    "tools of another name": (
        keys("rl_config.multi_turn_enable=true", "rl_config.tool_config_path=onw.yaml"),
        ["{here}/onw.yaml", "did you mean 'own.yaml'"]
    ),
    # keys and values
    "a key and a group of another name": (
        keys("rl_config.n_sampels_per_prompt=4", "actor_confg.lr=1"), ["is actor_config", "is rl_config.n_samples_per_prompt"]
    ),
    "a key of another project": (keys("actor_config.learning_rate=1e-4"), ["the nearest known key is actor_config.lr"]),
    "a key in another group": (keys("rl_config.lr=1e-4"), ["the nearest known key is megatron_training.lr"]),
    "a stage of another name": (keys("megatron_training.stage=grpo"), ["did you mean 'ray_grpo'?"]),
    "a platform of another name": (keys("platform=gpu"), ["did you mean 'cuda'?"]),
    "a number in words": (keys("actor_config.lr=fast"), ["actor_config.lr is 'fast', but must be a number"]),
    "a number with a comma": (keys("actor_config.lr='1,0e-5'"), ["'1,0e-5', but must be a number"]),
    "a negative rate": (keys("actor_config.lr=-1e-5"), ["actor_config.lr (-1e-05) must be at least 0"]),
    "a size with a k": (keys("megatron_training.global_batch_size=8k"), ["'8k', but must be a whole number"]),
    "a truth in another language": (keys("megatron_training.bf16=ja"), ["'ja', but must be true or false"]),
    "a list of one function without brackets": (keys("rl_config.verifier_function=digits"), ["'digits', but must be a list"]),
    "two weights for one reward": (keys("rl_config.verifier_weight=[0.5, 0.5]"), ["must have the same length"]),
    "adapters by the names of another library": (
        keys("actor_config.lora_r=8", "actor_config.lora_target_modules=[q_proj]"), ["did you mean 'linear_qkv'?"]
    ),
    "three engines for four heads": (
        keys("generate_config.infer_tensor_parallel_size=3"), ["num_attention_heads (4) must be divisible", "nearest values"]
    ),
    "room for no response": (keys("generate_config.max_model_len=10"), ["a longer prompt leaves no room for a response"]),
    "PPO without a critic": (keys("megatron_training.stage=ray_ppo"), ["needs the group critic_config"]),
    "no length": (keys("megatron_training.train_iters=null"), ["train_iters: not set", "train_epochs"]),
    "a length that is said twice": (keys("megatron_training.train_epochs=1"), ["say the length of the run twice"]),
    "results where a file is": (keys("actor_config.save=train.jsonl"), ["{here}/train.jsonl is not a folder"]),
    "results below a file": (keys("actor_config.save=train.jsonl/x"), ["{here}/train.jsonl is not a folder"]),
    "a rate in percent": (keys("actor_config.lr=1%"), ["actor_config.lr is '1%', but must be a number"]),
    "levels in a column that is not kept": (
        keys("rl_config.prompt_level_key=level"), ["prompt_level_key: train.jsonl, row 1 has None", "dataset_additional_keys"]
    ),
    "a cache below one sequence": (
        keys("generate_config.kv_cache_memory_gib=0.00001"), ["sequence of max_model_len=32 tokens takes", "leave the key out"]
    ),
    "results where nothing can be written": (keys("run_dir=/proc/x"), ["run_dir: /proc/x cannot be written to", "in /proc"]),
    # the text of the run file, and overrides
    "blanks in an override": (
        keys("actor_config.lr = 1e-4"), ["has blanks around the equals sign; write actor_config.lr=1e-4"]
    ),
    "an override without an equals sign": (keys("actor_config.lr 1e-4"), ["is not of the form group.key=value"]),
    "a full-width colon": (edited(lambda text: text + "\nrun_dir\uff1ax\n"), ["has a full-width colon"]),
    "a tab": (edited(lambda text: text + "\n\trun_dir: x\n"), ["'\\t' that cannot start any token"]),
    "a key that is there twice": (edited(lambda text: text + "\nplatform: cpu\n"), ["duplicate key platform"]),
    "a model block of another name": (
        edited(lambda text: "defaults:\n  - model: [qwen3_8B]\n" + text), ["model/qwen3_8B.yaml does not exist", "qwen3_8b"]
    ),
    "an empty run file": (edited(lambda text: ""), ["the group megatron_training is missing"]),
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
    "the same answer every time": (
        keys("generate_config.sampling_config.temperature=0"), ["the 4 responses to a prompt are the same"]
    ),
    "no learning rate": (keys("actor_config.lr=0"), ["actor_config.lr is 0: the weights stay as they are"]),
    "a huge learning rate": (keys("actor_config.lr=1"), ["actor_config.lr is 1: Adam moves each weight"]),
    "results in the folder of the model": (keys("actor_config.save=start/model"), ["save and load are the same folder"]),
    "responses without room": (keys("generate_config.sampling_config.max_tokens=99"), ["99 = 115", "counts as truncated"]),
    "held-out data that trains": (
        keys("megatron_training.eval_data_path=train.jsonl"), ["all held-out prompts are also in data_path"]
    ),
    "half of the held-out data trains": (
        held_out([*ROWS[:4], *HELD_OUT[:4]]), ["4 of 8 held-out prompts are also in data_path", "hold out others"]
    ),
    "held-out prompts with other labels": (held_out([{**row, "answer": "2"} for row in ROWS[:4]]), []),
    "labels of a spreadsheet": (
        rows(lambda index, row: {**row, "answer": "4-Mar" if index % 8 == 3 else "1"}),
        ["5 of 40 labels look like dates", "rows.jsonl, row 4: '4-Mar'", "format such columns as text"],
    ),
    "a task about dates": (rows(lambda index, row: {**row, "answer": "4-Mar"}), []),
    "tabs by their suffix": (
        written("rows.tsv", "question\tanswer\n" + "".join(f"{row['question']}\t1\n" for row in ROWS)), []
    ),
    "labels of missing values": (
        rows(lambda index, row: {**row, "answer": "1" if index % 4 else "NaN"}), ["10 of 40 labels are 'NaN' or alike"]
    ),
    "a tokenizer with one token more, in no row": (
        added_tokens(), ["warning: tokenizer_name_or_path='other': ", "lacks 1 added tokens", "('<new>'); texts with them"]
    ),
    "one row many times": (rows(lambda index, row: ROWS[0]), ["only 1 of 40 prompts are different"]),
    "weights of 0": (keys("rl_config.verifier_weight=[0.0]"), ["rewards are measured, and none trains"]),
    "a plug-in that is named as a module too": (keys("rl_config.verifier_function=['my_reward:digits']"), []),
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


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_tokenizer_that_does_not_fit_is_refused_in_supervised_stages_too(
    engine: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*changes: str) -> tuple[int, str]:
        columns = "{prompt: question, query: '', response: answer, system: ''}"
        keys = [*SFT[1], "model.tiny_qwen25.num_layers=null", "megatron_training.data_path=train.jsonl", *changes]
        keys += [f"+megatron_training.map_keys={columns}", "+megatron_training.prompt_type=empty"]
        code = explain(["--config-name", SFT[0], "--validate", *keys, f"+megatron_training.engine={engine}"])
        return code, capsys.readouterr().out

    assert "lacks 1 added tokens" in check(*added_tokens()())[1]
    shutil.rmtree("other")
    code, output = check(*added_tokens(pad_token="<new>")())
    assert code == 2 and "its pad_token is token" in output, output
    shutil.rmtree("other")
    code, output = check(*other_vocabulary())
    assert code == 2 and "tokens of text, such as 5004 (" in output, output


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
        keys("import", "trl", "--devices", "1", "trl grpo --model_name_or_path x --learnin_rate 1e-5"),
        ["learnin_rate", "names no data"],
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

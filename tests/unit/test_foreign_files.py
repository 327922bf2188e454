"""Every reader of a file from elsewhere gives its content or one ValueError that names the file; never another error.

Bytes and fields are changed by fixed seeds. Memory is limited to 2 GiB above what the process has, and each reader to 20 s of
its whole set of files, of which an idle machine needs less than one.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from patience import patient
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from spoilt_values import change_field
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.dist import read_metadata
from mindspeed_rl.checkpoint.hf import read_weight_files
from mindspeed_rl.checkpoint.lora import open_peft
from mindspeed_rl.checkpoint.newest import newest_checkpoint
from mindspeed_rl.checkpoint.torch_file import load_with_records
from mindspeed_rl.cli import trace
from mindspeed_rl.cli.report import _make_shareable
from mindspeed_rl.config.expert_map import read_expert_map
from mindspeed_rl.data.configurations import read_configurations
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.datasets import StoredLogProbs
from mindspeed_rl.data.images import ImageRules, check_images, make_reference, open_image, prepare_images
from mindspeed_rl.data.indexed import IndexedWriter, check_token_ids, open_indexed
from mindspeed_rl.data.sources import open_source, read_rows
from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.tokenizer import check_tokens, load_tokenizer
from mindspeed_rl.inference.tasks.files import read_data_rows
from mindspeed_rl.models.plan import read_model
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.page import _collect_data as collect_data
from mindspeed_rl.observability.run_files import ServerFolder, ServerOffer, read_run
from mindspeed_rl.tools.tool_file import read_tools
from mindspeed_rl.trainers.prompt_groups import load_groups

ROWS = [{"question": f"how much is {number} é?", "answer": str(number), "n": [1, {"a": None}]} for number in range(30)]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
RUN_FILES = ("metrics.jsonl", "completions.jsonl", "examples.jsonl", "timeline.json", "report.json")


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------------- writers: folder -> the file that is spoilt


def write_weights(folder: Path) -> Path:
    save_file({"model.a.weight": torch.ones(4, 2), "b": torch.ones(3)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_weight_index(folder: Path) -> Path:
    save_file({"a": torch.ones(4, 2)}, folder / "model-00001-of-00001.safetensors")
    return write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "model-00001-of-00001.safetensors"}})


def write_adapter(folder: Path) -> Path:
    tensors = {"base_model.model.q.lora_A.weight": torch.ones(2, 4), "base_model.model.q.lora_B.weight": torch.ones(6, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return write_json(folder / "adapter_config.json", LORA)


def write_adapter_weights(folder: Path) -> Path:
    write_adapter(folder)
    return folder / "adapter_model.safetensors"


def open_adapter(path: Path) -> object:
    return open_peft(path.parent, [WeightOp("q.weight", ("q.weight",), ((6, 4),))])


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 99}
    write_json(folder / "tokenizer_config.json", settings)
    return folder / "tokenizer.json"


def write_tokenizer_settings(folder: Path) -> Path:
    return write_tokenizer(folder).with_name("tokenizer_config.json")


def open_tokenizer(path: Path) -> None:
    check_tokens(load_tokenizer(path.parent), path.parent)


def write_index(folder: Path) -> Path:
    writer = IndexedWriter(folder / "rows")
    for row in range(5):
        writer.add_documents(np.arange(row + 3, dtype=np.int32), [row + 3])
    writer.close()
    return folder / "rows.idx"


def open_index(path: Path) -> None:
    rows = open_indexed(path.with_suffix(""))
    check_token_ids(path.with_suffix(""), 100, allows_ignored=False)
    for index in range(len(rows)):
        assert len(rows[index]) < 100


def write_teacher(folder: Path) -> Path:
    content = np.zeros(4, StoredLogProbs.record(2))
    (folder / "rows_teacher.bin").write_bytes(content.tobytes())
    return write_json(folder / "rows_teacher.json", {"lengths": [1, 3], "topk": 2})


def open_teacher(path: Path) -> object:
    return StoredLogProbs(path.with_name("rows"))


def write_batch(folder: Path) -> Path:
    columns = {
        "input_ids": torch.ones(2, 5, dtype=torch.int64), "prompt_lengths": torch.tensor([2, 2]),
        "response_lengths": torch.tensor([3, 3]), "response_mask": torch.ones(2, 3, dtype=torch.bool),
        "rewards": torch.ones(2), "log_probs": torch.zeros(2, 3),
    }  # fmt: skip
    save_file(columns, folder / "batch.safetensors")
    fields = {"format": "mindspeed_rl.rollout_batch", "version": 1, "group_size": 2, "max_response_length": 3}
    return write_json(folder / "batch.json", {**fields, "stage": "ray_grpo", "rl_config": {}})


def open_batch(path: Path) -> object:
    return RolloutBatch.load(path.with_suffix(".safetensors"))


def write_rows(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path, table = folder / name, pd.DataFrame(ROWS)
        lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        plain = table.drop(columns="n")
        contents: dict[str, Callable[[], object]] = {
            "rows.parquet": lambda: plain.to_parquet(path),
            "rows.arrow": lambda: plain.to_feather(path, compression="uncompressed"),
            "rows.csv": lambda: plain.to_csv(path, index=False),
            "rows.json": lambda: path.write_text(json.dumps(ROWS)),
            "rows.jsonl": lambda: path.write_bytes(lines),
            "rows.jsonl.gz": lambda: path.write_bytes(gzip.compress(lines)),
        }
        contents[name]()
        return path

    return write


def read_source(path: Path) -> None:
    source = open_source(str(path))
    source.total_weight()
    for file, number, row in read_rows(source):
        if isinstance(row, MalformedRowError):
            raise ValueError(f"{file}, row {number}: {row}")


def write_saved(folder: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list([{"a": 1}, {"a": 2}]).save_to_disk(folder / "saved")
    return folder / "saved" / "state.json"


def write_image(folder: Path) -> Path:
    Image.fromarray(np.arange(28 * 28 * 3, dtype=np.uint8).reshape(28, 28, 3)).save(folder / "image.png")
    return folder / "image.png"


def open_picture(path: Path) -> None:
    rules = ImageRules("", 14, 2, 2, 28 * 28, 84 * 84, token_id=5, frame=(4, 6))
    reference = make_reference(str(path))
    check_images([reference])
    prepare_images(rules, [reference])
    open_image(reference)


def write_gguf(folder: Path) -> Path:
    gguf = pytest.importorskip("gguf", reason="the package gguf: bash envs/cpu/install.sh")
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "qwen2")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    for name, value in {**sizes, "attention.head_count": 2, "attention.head_count_kv": 2}.items():
        writer.add_uint32(f"qwen2.{name}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list(["a", "b", "c"])
    block = {"attn_q": 2, "attn_k": 2, "attn_v": 2, "attn_output": 2, "ffn_gate": 2, "ffn_up": 2, "ffn_down": 2}
    for name in block:
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), dtype=np.float32))
    for name in ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_norm.weight", "ffn_norm.weight"):
        writer.add_tensor(f"blk.0.{name}", np.zeros(32, dtype=np.float32))
    for name, rows in (("token_embd", 8), ("output_norm", 0)):
        writer.add_tensor(f"{name}.weight", np.zeros((rows, 32) if rows else 32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def open_model(path: Path) -> None:
    from mindspeed_rl.checkpoint.gguf import open_gguf

    assert [tensor.shape for _, tensor in open_gguf(path).named_tensors()]


def write_torch(folder: Path) -> Path:
    torch.save({"model": {"weight": torch.ones(2)}, "args": [1, 2.5]}, folder / "model_optim_rng.pt")
    return folder / "model_optim_rng.pt"


def write_dist(folder: Path) -> Path:
    import pickle

    metadata = Metadata({"x": BytesStorageMetadata()}, planner_data={}, storage_data={})
    return write_bytes(folder / ".metadata", pickle.dumps(metadata))


def write_tracker(folder: Path) -> Path:
    (folder / "iter_0000004").mkdir(exist_ok=True)
    return write_bytes(folder / "latest_checkpointed_iteration.txt", b"4\n")


def write_card(folder: Path) -> Path:
    (folder / "a.jsonl").write_text("{}")
    text = "---\nconfigs:\n- config_name: one\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n# text\n"
    return write_bytes(folder / "README.md", text.encode())


def write_groups(folder: Path) -> Path:
    group = {"number": 0, "version": 1, "samples": [None], "results": None}
    metadata = {"format": "mindspeed_rl.in_flight", "groups": json.dumps([group])}
    save_file({"tokens": torch.ones(3, dtype=torch.int64)}, folder / "groups.safetensors", metadata=metadata)
    return folder / "groups.safetensors"


def write_expert_map(folder: Path) -> Path:
    layer = {"layer_id": 0, "device_count": 1, "device_list": [{"device_id": 0, "device_expert": [0, 1]}]}
    return write_json(folder / "map.json", {"moe_layer_count": 1, "layer_list": [layer]})


def write_run(name: str) -> Callable[[Path], Path]:
    """All files of a run folder that a page reads, one of which is spoilt."""
    tokens = {"ids": [1, 2], "texts": ["a", "é"], "log_probs": [-0.5, -1.0], "loss_mask": [True, False], "advantages": [0.5, 1]}
    turn = {"name": "model", "parent": None, "start": 0, "stop": 1, "start_s": 1.0, "end_s": 2.0, "reward": None, "failed": 0}
    events = [turn, {**turn, "name": "run", "parent": 0, "reward": 0.5}, {**turn, "parent": 1}]
    sample = {"prompt": "p", "response": "aé", "reward": 1.0, "advantage": 0.5, "parts": {"acc": 1.0}, "extra": {"label": "a"}}
    example = {"prompt": "p", "response": "r", "label": "l", "reward": 0.5}
    worker = {"pid": 0, "tid": 0, "ph": "M", "name": "thread_name", "args": {"name": "driver"}}
    phase = {"pid": 0, "tid": 0, "ph": "X", "name": "all", "ts": 0.0, "dur": 5.0}
    report = {"title": "t", "outcome": "finished", "planned_iterations": 3, "versions": {"torch": "2"}, "plan": {"rows": []}}
    files: dict[str, list[Any]] = {
        "metrics.jsonl": [{"iteration": number, "grpo/score/mean": 0.5, "eval/accuracy": None} for number in range(4)],
        "completions.jsonl": [{"iteration": number, **sample, "tokens": tokens, "events": events} for number in (1, 2)],
        "examples.jsonl": [{"iteration": number, "index": index, **example} for number in (0, 3) for index in (0, 1)],
        "timeline.json": [worker, *({**phase, "args": {"iteration": number}} for number in (1, 2))],
        "report.json": [{**report, "config_set": {"rl_config": {"kl": 1}}, "config": {"actor_config": {"save": "s"}}}],
    }

    def write(folder: Path) -> Path:
        for file, records in files.items():
            (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder / name

    return write


def open_run(path: Path) -> None:
    run = read_run(path.parent)
    find_alerts(run.history, run.completions)
    json.dumps(collect_data([_make_shareable(run, 1)]) | collect_data([run]), allow_nan=False)
    console = Console(file=io.StringIO())
    samples = trace._read_samples(path.parent, None)
    trace._print_table(console, samples)
    for sample in samples:
        if (sample.get("tokens") or {"log_probs": []}).get("log_probs") is not None:
            trace._print_sample(console, sample, "log-prob", with_table=True)


def write_offer(folder: Path) -> Path:
    servers = ServerFolder(folder)
    servers.open({})
    return servers.offer(ServerOffer("127.0.0.1", 8000, "token"))


def open_offer(path: Path) -> None:
    offers = ServerFolder(path.parents[1]).list_offers()  # a damaged one is named in the log
    if not offers:
        raise ValueError(f"{path} is passed over")
    assert 0 < offers[0].port < 65536


@dataclass(frozen=True)
class Reader:
    """A reader of a file.

    Attributes:
        write: writes a sound file into a folder, and returns its path.
        read: reads it.
        count: spoilt files of each kind.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    count: int = 120


READERS: dict[str, Reader] = {
    "safetensors": Reader(write_weights, lambda path: read_weight_files(path.parent)),
    "index of safetensors": Reader(write_weight_index, lambda path: read_weight_files(path.parent)),
    "config.json": Reader(lambda folder: write_json(folder / "config.json", CONFIG), lambda path: read_model(path.parent)),
    "adapter_config.json": Reader(write_adapter, open_adapter),
    "weights of an adapter": Reader(write_adapter_weights, open_adapter),
    "tokenizer.json": Reader(write_tokenizer, open_tokenizer, 60),
    "tokenizer_config.json": Reader(write_tokenizer_settings, open_tokenizer, 60),
    "index of columns": Reader(write_index, open_index),
    "log-probs of a teacher": Reader(write_teacher, open_teacher),
    "rollout batch": Reader(write_batch, open_batch),
    "weights of a rollout batch": Reader(lambda folder: write_batch(folder).with_suffix(".safetensors"), open_batch),
    **{name: Reader(write_rows(name), read_source) for name in ("rows.parquet", "rows.arrow", "rows.csv", "rows.json")},
    **{name: Reader(write_rows(name), read_source) for name in ("rows.jsonl", "rows.jsonl.gz")},
    "task rows.csv": Reader(write_rows("rows.csv"), lambda path: list(read_data_rows(path))),
    "task rows.json": Reader(write_rows("rows.json"), lambda path: list(read_data_rows(path))),
    "task rows.jsonl.gz": Reader(write_rows("rows.jsonl.gz"), lambda path: list(read_data_rows(path))),
    "saved data set": Reader(write_saved, lambda path: read_source(path.parent), 40),
    "image": Reader(write_image, open_picture),
    "gguf": Reader(write_gguf, open_model, 400),
    "torch file": Reader(write_torch, load_with_records),
    "index of torch_dist": Reader(write_dist, read_metadata),
    "tracker": Reader(write_tracker, lambda path: newest_checkpoint(path.parent)),
    "card": Reader(write_card, lambda path: read_configurations(path.parent)),
    "groups in flight": Reader(write_groups, lambda path: load_groups(path, lambda number: {})),  # pyrefly: ignore
    "expert map": Reader(write_expert_map, read_expert_map),
    "templates": Reader(
        lambda folder: write_json(folder / "templates.json", [{"name": "mine", "format_user": {"slots": ["{{content}}"]}}]),
        lambda path: load_template("mine", path=path),
    ),
    "tools": Reader(
        lambda folder: write_bytes(folder / "tools.yaml", b"tools:\n- class_name: calculator\n  config: {}\n"),
        lambda path: read_tools(str(path)),
    ),
    "offer of a server": Reader(write_offer, open_offer),
    **{f"{name} of a run": Reader(write_run(name), open_run) for name in RUN_FILES},
    "checksums": Reader(
        lambda folder: write_json(folder / "checksums.json", {"a.bin": [3, 7]}), lambda path: checksums.read(path.parent)
    ),
}


def damage(content: bytes, at: random.Random) -> bytes:
    """Change some bytes, cut, insert, or set a run to 0x00 or 0xff."""
    spoilt = bytearray(content)
    for _ in range(at.choice((1, 1, 3, 20))):
        place = at.randrange(min(len(spoilt), at.choice((64, len(spoilt))))) if spoilt else 0
        kind = at.choice(("flip", "flip", "cut", "insert", "zeros", "ones"))
        if kind == "flip" and spoilt:
            spoilt[place] = at.randrange(256)
        elif kind == "cut":
            del spoilt[place:]
            break
        elif kind == "insert":
            spoilt[place:place] = bytes(at.randrange(256) for _ in range(5))
        else:
            spoilt[place : place + 8] = (b"\0" if kind == "zeros" else b"\xff") * 8
    return bytes(spoilt)


def list_spoilt(path: Path, count: int, seed: int = 70) -> Iterator[bytes]:
    at, content = random.Random(seed), path.read_bytes()
    yield b""
    yield b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n"
    yield b"<html>404</html>"
    yield b"[" * 100_000
    yield b"\0" * 4096
    for _ in range(count):
        yield damage(content, at)
    lines = content.decode("utf-8", "replace").splitlines()
    is_lines = path.name in RUN_FILES
    for _ in range(count if is_lines else 0):
        line = at.randrange(len(lines))
        changed = [*lines[:line], json.dumps(change_field(json.loads(lines[line]), at)), *lines[line + 1 :]]
        yield "\n".join([*changed, ""]).encode("utf-8", "surrogatepass")
    if path.suffix == ".json" and not is_lines:
        for _ in range(count):
            yield json.dumps(change_field(json.loads(content), at)).encode("utf-8", "surrogatepass")


@pytest.fixture
def bounds() -> Iterator[None]:
    """End a reader that takes 20 s, or 2 GiB more than now."""

    def stop(*_: object) -> None:
        raise TimeoutError("the reader does not end")

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), before[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, patient(20))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("name", READERS)
def test_a_spoilt_file_is_read_or_named(name: str, tmp_path: Path) -> None:
    try_spoilt(name, tmp_path, READERS[name].count, 70)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", READERS)
def test_other_spoilt_files_are_read_or_named(name: str, seed: int, tmp_path: Path) -> None:
    try_spoilt(name, tmp_path, 400, seed)


def try_spoilt(name: str, tmp_path: Path, count: int, seed: int) -> None:
    reader = READERS[name]
    path = reader.write(tmp_path)
    reader.read(path)
    refused = 0
    for content in list_spoilt(path, count, seed):
        path.write_bytes(content)
        try:
            reader.read(path)
        except ValueError as error:
            refused += 1
            assert str(tmp_path) in str(error), (content[:300], error)
            assert len(str(error)) < 3000
    assert refused or name == "card"  # a text for people, which need not declare anything


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("kind", ["named pipe", "device", "folder", "dangling link"])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    reader = READERS[name]
    path = reader.write(tmp_path)
    path.unlink()
    makers: dict[str, Callable[[], object]] = {
        "named pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "dangling link": lambda: path.symlink_to(tmp_path / "nothing"),
    }
    makers[kind]()
    if name in ("card", "checksums"):  # which a folder need not have
        assert not reader.read(path)
        return
    if kind == "dangling link" and name.removesuffix(" of a run") in RUN_FILES:  # each of them may be missing
        return
    with pytest.raises(ValueError, match=r".") as caught:
        reader.read(path)
    assert str(tmp_path) in str(caught.value)

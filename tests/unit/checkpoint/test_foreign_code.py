"""Files from elsewhere are data: no reader of the package runs what is pickled in them, and each refusal names the file."""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import pickle
import random
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from mindspeed_rl.checkpoint.dist import DistFolder, DistReader, read_metadata
from mindspeed_rl.checkpoint.hf import read_weight_files
from mindspeed_rl.checkpoint.lora import open_peft
from mindspeed_rl.checkpoint.mcore import MegatronFolder
from mindspeed_rl.checkpoint.torch_file import check_small_files, load_with_records

ROOT = Path(__file__).parents[3]

#: calls that run what a file says
UNSAFE = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "pickle._Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "pandas.read_pickle",
    "shelve.open",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "yaml.full_load",
    "yaml.unsafe_load",
}
#: file -> the calls of it that are right, since their bytes come from a process of the same run, or are checked name by name
ALLOWED = {
    "mindspeed_rl/checkpoint/torch_file.py": {"pickle.Unpickler", "torch.load"},
    "mindspeed_rl/dataplane/transfer_queue.py": {"pickle.loads"},
    "mindspeed_rl/isolation/harness.py": {"marshal.loads"},
    "mindspeed_rl/rollout/in_process.py": {"pickle.loads"},
}


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in call.keywords if word.arg}


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def unsafe_names(source: str) -> Iterator[str]:
    """Names of calls and bases of a module that run what a file says, by their full names."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
                      for alias in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return known.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from UNSAFE & {full(base) for base in node.bases}
        if not isinstance(node, ast.Call):
            continue
        name = full(node.func)
        if name in UNSAFE:
            yield name
        if name == "torch.load" and not is_true(keywords(node).get("weights_only")):
            yield name
        if name in ("numpy.load", "numpy.lib.format.read_array") and is_true(keywords(node).get("allow_pickle")):
            yield name
        if name == "yaml.load" and "Safe" not in ast.unparse(node):
            yield name


def test_no_module_unpickles_a_file() -> None:
    folders = ["mindspeed_rl", "tools", "compat", "examples", "benchmarks", "configs", "envs"]
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 400
    results = {str(path.relative_to(ROOT)): set(unsafe_names(path.read_text(encoding="utf-8"))) for path in files}
    assert {name: calls for name, calls in results.items() if calls} == ALLOWED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle\npickle.load(file)", "pickle.load"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("import torch as t\nt.load('a', weights_only=False)", "torch.load"),
        ("import torch\ntorch.load('a')", "torch.load"),
        ("import numpy as np\nnp.load('a', allow_pickle=True)", "numpy.load"),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
    ],
)
def test_the_search_finds_each_form(source: str, name: str) -> None:
    assert list(unsafe_names(source)) == [name]


# ---------------------------------------------------------------- what is hostile


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def bombs(exploded: Path) -> dict[str, object]:
    command = f"touch {exploded}"
    return {
        "os.system": Call(os.system, command),
        "eval": Call(eval, f"open({str(exploded)!r}, 'w')"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "Path.touch": Call(Path.touch, exploded),
        "torch.load": Call(torch.load, str(exploded)),
        "state": Call(builtins.exec, f"open({str(exploded)!r}, 'w')"),
    }


def zipped(content: object, path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2)}, "args": content}, path, pickle_protocol=4)


def legacy(content: object, path: Path) -> None:
    torch.save({"model": {}, "args": content}, path, _use_new_zipfile_serialization=False)


def index(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def hidden_in_index(content: object, path: Path) -> None:
    """The index is one, and the code is in what Megatron adds to it."""
    metadata = Metadata({"x": BytesStorageMetadata()}, planner_data={}, storage_data={})
    metadata.all_local_plans = [content]  # pyrefly: ignore[missing-attribute]
    path.write_bytes(pickle.dumps(metadata))


def of_rank(path: Path) -> object:
    folder = path.parent / "iter_0000001/mp_rank_00"
    folder.mkdir(parents=True)
    path.rename(folder / "model_optim_rng.pt")
    return MegatronFolder(path.parent, 1)


def of_dist(path: Path) -> object:
    folder = path.parent / "iter_0000001"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    path.rename(folder / ".metadata")
    return DistFolder(path.parent, 1)


def of_resume(name: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        path.rename(path.parent / name)
        return check_small_files(path.parent)

    return read


READERS: dict[str, tuple[Callable[[object, Path], None], Callable[[Path], object]]] = {
    "torch file": (zipped, load_with_records),
    "torch file, tensors": (zipped, lambda path: load_with_records(path, as_tensors=True)),
    "torch file of before 1.6": (legacy, load_with_records),
    "per-rank checkpoint": (zipped, of_rank),
    "per-rank checkpoint of before 1.6": (legacy, of_rank),
    "index": (index, read_metadata),
    "index with plans": (hidden_in_index, read_metadata),
    "torch_dist checkpoint": (index, of_dist),
    "resumed index": (index, of_resume(".metadata")),
    "resumed index with plans": (hidden_in_index, of_resume(".metadata")),
    "resumed common state": (zipped, of_resume("common.pt")),
}


@pytest.mark.parametrize("bomb", list(bombs(Path())))
@pytest.mark.parametrize("reader", list(READERS))
def test_code_is_refused_by_the_name_of_the_file_and_never_runs(tmp_path: Path, reader: str, bomb: str) -> None:
    write, read = READERS[reader]
    write(bombs(tmp_path / "exploded")[bomb], tmp_path / "file")
    with pytest.raises(ValueError, match=r"(file|model_optim_rng.pt|\.metadata|common.pt)\b.*refusing to (load|take)"):
        read(tmp_path / "file")
    assert not (tmp_path / "exploded").exists()


def test_weights_that_only_a_pickle_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    zipped(bombs(tmp_path / "exploded")["os.system"], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\*\.bin files; save it as safetensors"):
        read_weight_files(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    zipped(bombs(tmp_path / "exploded")["os.system"], tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors"):
        open_peft(tmp_path, {}, None, None)
    assert not (tmp_path / "exploded").exists()


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    for name, start in (("../other.distcp", 0), ("/etc/passwd", 0), ("a.distcp", -1)):
        metadata = Metadata({"x": BytesStorageMetadata()}, planner_data={}, storage_data={})
        metadata.storage_data = {MetadataIndex("x"): _StorageInfo(name, start, 1)}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=r"\.metadata cannot be read: its entry 'x' is at"):
            read_metadata(tmp_path / ".metadata")


def test_a_tensor_does_not_reach_out_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"secret": torch.ones(64), "small": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in contents if name.endswith("data.pkl"))
    # a shape of 4 (BININT1) becomes one of 64; the storage stays
    assert contents[name].count(b"K\x04\x85") == 1
    contents[name] = contents[name].replace(b"K\x04\x85", b"K\x40\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in contents.items():
            archive.writestr(entry, content)
    with pytest.raises(ValueError, match=r"file.pt: a tensor of shape \[64\] does not fit its 16 bytes"):
        load_with_records(path)


def damage(content: bytes, at: random.Random) -> bytes:
    spoiled = bytearray(content)
    for _ in range(at.choice((1, 1, 4, 30))):
        spoiled[at.randrange(len(spoiled))] = at.randrange(256)
    return bytes(spoiled[: at.randrange(len(spoiled))] if at.random() < 0.3 else spoiled)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """2 GiB more than now: a spoilt number in a pickle may ask for any amount."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_a_damaged_file_is_an_error_with_its_name_whatever_the_damage(tmp_path: Path) -> None:
    at, path = random.Random(7), tmp_path / "file"
    contents = []
    for write, content in ((zipped, {"a": [1, 2.5, "x"]}), (legacy, {"a": (1, None)})):
        write(content, path)
        contents.append((path.read_bytes(), load_with_records))
    contents.append((pickle.dumps(Metadata({"x": BytesStorageMetadata()}, planner_data={}, storage_data={})), read_metadata))
    refused = 0
    for content, read in contents:
        for _ in range(300):
            path.write_bytes(damage(content, at))
            try:
                read(path)
            except ValueError as error:
                refused += 1
                assert str(path) in str(error)
    assert refused > 200


# ---------------------------------------------------------------- what the adaptor of Megatron's load is for


class Explosion:
    """Says that it was built."""

    happened = False

    def __reduce__(self) -> tuple:
        return setattr, (Explosion, "happened", True)


@pytest.fixture
def explosion() -> Iterator[Explosion]:
    Explosion.happened = False
    yield Explosion()
    Explosion.happened = False


def test_torchs_reader_runs_what_an_index_says_and_ours_does_not(tmp_path: Path, explosion: Explosion) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(explosion))
    with pytest.raises(ValueError, match="refusing to load builtins.setattr"):
        DistReader(tmp_path).read_metadata()
    assert not Explosion.happened
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert Explosion.happened


def test_torchs_planner_runs_what_an_object_says(explosion: Explosion) -> None:
    planner: Any = DefaultLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    content, place = io.BytesIO(), MetadataIndex("x")
    torch.save(explosion, content)
    content.seek(0)
    empty = torch.Size(())
    planner.load_bytes(ReadItem(LoadItemType.BYTE_IO, place, empty, place, empty, empty), content)
    assert Explosion.happened


def test_an_environment_variable_makes_torch_run_what_a_common_state_says(
    tmp_path: Path, explosion: Explosion, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped(explosion, tmp_path / "common.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ValueError, match="refusing to load builtins.setattr"):
        load_with_records(tmp_path / "common.pt", as_tensors=True)
    assert not Explosion.happened
    torch.load(tmp_path / "common.pt")
    assert Explosion.happened


def test_tensors_and_plain_data_come_back_as_they_were_saved(tmp_path: Path) -> None:
    content = {"a": torch.arange(6.0).reshape(2, 3).T, "b": [torch.ones(3, dtype=torch.bfloat16)], "c": {"d": (1, "x", None)}}
    torch.save(content | {"e": io.BytesIO(b"scales")}, tmp_path / "common.pt")
    result = load_with_records(tmp_path / "common.pt", as_tensors=True)
    assert torch.equal(result["a"], content["a"]) and torch.equal(result["b"][0], content["b"][0])
    assert result["c"] == content["c"] and result["e"].getvalue() == b"scales"
    assert json.dumps(result["c"])

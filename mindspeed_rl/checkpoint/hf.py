"""HF checkpoint folders: safetensors by slice, index, config, tokenizer files; written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.stacked_experts import is_stack, separate_stacks
from mindspeed_rl.checkpoint.tensor_record import ColumnsRecord, RecordSource, TensorRecord
from mindspeed_rl.files import describe_foreign, describe_missing, open_regular, read_json
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.architecture import ExpertNames

_SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}

#: Files beside the weights that make an HF folder usable.
_COMPANION_PATTERNS = ("*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt", "*.py")
# they describe the weights or the training beside them, not the model
_NOT_COMPANIONS = ("*.index.json", "adapter_config.json", "trainer_state.json", "conversion.json")

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


def read_safetensors_header(path: Path) -> dict[str, TensorRecord]:
    """Read the place of every tensor in a safetensors file.

    Raises:
        ValueError: the file is missing, truncated, or not a safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"weight file {path} is missing")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(64)
        if (foreign := describe_foreign(first)) is not None:
            raise ValueError(f"{path} is {foreign}")
        length = int.from_bytes(first[:8], "little")
        file.seek(8)
        # before it is read: a damaged length could ask for any amount of memory
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is truncated: {size} bytes cannot hold its header")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    records = {}
    for name, entry in header.items() if isinstance(header, dict) else [("the header", header)]:
        if name == "__metadata__":
            continue
        if not _is_entry(entry):
            raise ValueError(f"{path} is not a safetensors file: {name} has no dtype, shape and data_offsets")
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which is not supported")
        begin, end = entry["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{path} is truncated: {size} bytes, but {name} ends at byte {8 + length + end}")
        record = TensorRecord(str(path), 8 + length + begin, tuple(entry["shape"]), _SAFETENSORS_DTYPES[entry["dtype"]])
        if record.num_bytes != end - begin:
            raise ValueError(f"{path}: {name} of shape {entry['shape']} occupies {end - begin} bytes, not {record.num_bytes}")
        records[name] = record
    return records


def _is_entry(entry: object) -> bool:
    """Return whether a value in a safetensors header describes a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(isinstance(value, int) and value >= 0 for value in (*shape, *offsets))


class HfFolder(RecordSource):
    """An HF checkpoint folder opened for reading; a TensorSource over the names of its tensors.

    Experts that transformers stored fused (``experts.gate_up_proj`` [E, 2F, H]) are also found under the separate names of the
    architecture; ``renamed`` are the stored tensors of which this is so.

    Args:
        path: folder with config.json and safetensors files, one or sharded.

    Raises:
        ValueError: config.json, a weight file or a tensor named in the index is missing, or a file is truncated.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder" if folder.exists() else describe_missing(folder))
        self.path = folder
        self.config = read_json(folder / "config.json")
        stored = read_weight_files(folder)
        separate: dict[str, TensorRecord] = {}
        self.renamed: frozenset[str] = frozenset()
        if any(map(is_stack, stored)) and architecture_for(self.config).expert_names.stacked:
            separate, self.renamed = separate_stacks(stored)
        elif any(_FUSED_EXPERTS.match(name) for name in stored):
            architecture = architecture_for(self.config)
            hidden = architecture.read_model_config(self.config).hidden_size
            separate, self.renamed = _separate_experts(stored, architecture.expert_names, hidden)
        super().__init__(records={**stored, **separate}, origin=str(folder))
        self.stored_names: tuple[str, ...] = tuple(stored)

    def __reduce__(self) -> tuple[type[HfFolder], tuple[Path]]:
        return HfFolder, (self.path,)


def list_missing_shards(folder: Path) -> list[str]:
    """Return the weight files that the index of a folder names and that are not there; none without an index."""
    if not (folder / INDEX_NAME).is_file():
        return []
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    return sorted(name for name in names if not (folder / name).is_file())


def has_weights(folder: Path, names: Iterable[str]) -> bool:
    """Return True where an HF folder has safetensors with all of these tensors."""
    return any(folder.glob("*.safetensors")) and read_weight_files(folder).keys() >= set(names)


def read_weight_files(folder: Path) -> dict[str, TensorRecord]:
    """Read the records of an HF folder's tensors from its index and headers; ValueError as for `HfFolder`."""
    index_path = folder / INDEX_NAME
    if not os.path.lexists(index_path):
        if (folder / _SINGLE_NAME).is_file():
            return read_safetensors_header(folder / _SINGLE_NAME)
        # an only file may have any name; an adapter's is not a model
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1 and files[0].name != "adapter_model.safetensors":
            return read_safetensors_header(files[0])
        if list(folder.glob("pytorch_model*.bin")):
            raise ValueError(f"{folder} holds pytorch_model*.bin files; save it as safetensors first (save_pretrained does)")
        raise ValueError(f"{folder} has neither {_SINGLE_NAME} nor {INDEX_NAME}")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise ValueError(f"{index_path} has no weight_map from tensor names to files")
    records: dict[str, TensorRecord] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if not path.is_file():
            raise ValueError(f"{folder} lacks {file_name}, which {INDEX_NAME} names")
        records |= read_safetensors_header(path)
    for name, file_name in weight_map.items():
        if name not in records:
            raise ValueError(f"{file_name} lacks tensor {name!r}, which {INDEX_NAME} places there")
    return records


_FUSED_EXPERTS = re.compile(r"^(.+)\.mlp\.experts\.(gate_up_proj|down_proj)$")


def _separate_experts(
    records: Mapping[str, TensorRecord], names: ExpertNames, hidden: int
) -> tuple[dict[str, TensorRecord], frozenset[str]]:
    """Return the separate weights that fused expert tensors consist of, and the stored tensors that they are taken from."""
    separate: dict[str, TensorRecord] = {}
    renamed: set[str] = set()
    for name, record in records.items():
        match = _FUSED_EXPERTS.match(name)
        if not match or len(record.shape) != 3:
            continue
        parent, kind = match.groups()
        block, router = f"{parent}.{names.block}", f"{parent}.mlp.gate.weight"
        renamed.add(name)
        # transformers keeps the router beside fused experts under mlp, whatever the family's block is called
        if names.block != "mlp" and router in records:
            renamed.add(router)
            separate[f"{block}.gate.weight"] = records[router]
        for expert in range(record.shape[0]):
            whole = record.rows(expert, expert + 1).reshaped(*record.shape[1:])
            inputs = hidden if kind == "gate_up_proj" else whole.shape[1]
            outputs = whole.shape[0] if kind == "gate_up_proj" else hidden
            if names.may_be_transposed and whole.shape != (outputs, inputs):
                rows, columns = whole.shape
                whole = ColumnsRecord(whole.path, whole.offset, (columns, rows), whole.dtype, columns, 0)
            half = whole.shape[0] // 2
            if kind == "gate_up_proj":
                parts = {names.gate: whole.rows(0, half), names.up: whole.rows(half, 2 * half)}
            else:
                parts = {names.down: whole}
            separate |= {f"{block}.experts.{expert}.{part}.weight": record for part, record in parts.items()}
    return separate, frozenset(renamed)


# ---------------------------------------------------------------------- writing


def make_safetensors_header(entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Build the first bytes of a safetensors file and the offset of every tensor in it, in the given order."""
    # as save_pretrained writes: older transformers refuse a file that does not say it
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    starts: dict[str, int] = {}
    for name, dtype, shape in entries:
        size = TensorRecord("", 0, shape, dtype).num_bytes
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        starts[name] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # data that begin at a multiple of 8 can be mapped as any dtype
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: base + start for name, start in starts.items()}


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[tuple[str, list[str]]]:
    """Plan file name and tensor names of every weight file; a file exceeds the limit only if one tensor does."""
    files: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not files or filled + size > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) <= 1:
        return [(_SINGLE_NAME, names) for names in files]
    return [(f"model-{i:05d}-of-{len(files):05d}.safetensors", names) for i, names in enumerate(files, 1)]


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write ``model.safetensors.index.json`` if there is more than one weight file."""
    if set(weight_map.values()) == {_SINGLE_NAME}:
        return
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _companion_files(folder: Path) -> list[Path]:
    """List config, generation config, tokenizer and code files of an HF folder (no weights, no index)."""
    companions = {path for pattern in _COMPANION_PATTERNS for path in folder.glob(pattern)}
    skipped = {path for pattern in _NOT_COMPANIONS for path in folder.glob(pattern)}
    return sorted(path for path in companions - skipped if path.is_file())


def copy_companions(source: Path, target: Path, config_changes: Mapping[str, Any] | None = None) -> None:
    """Copy the companion files of an HF folder; ``config_changes`` replaces keys of config.json (None removes one)."""
    target.mkdir(parents=True, exist_ok=True)
    for path in _companion_files(source):
        shutil.copyfile(path, target / path.name)
    if config_changes:
        config = read_json(target / "config.json")
        config.update(config_changes)
        write_config(target, {key: value for key, value in config.items() if value is not None or key not in config_changes})


def set_end_token(folder: Path, token: str) -> None:
    """Make a token the end token of an HF folder: of its tokenizer, its generation settings and config.json.

    Generation stops at the earlier end tokens, too. A folder without tokenizer.json stays as it is.

    Raises:
        ValueError: the tokenizer does not have the token.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    content = read_json(folder / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", ())}
    vocabulary = content.get("model", {}).get("vocab", {})
    token_id = added.get(token, vocabulary.get(token) if isinstance(vocabulary, dict) else None)
    if token_id is None:
        raise ValueError(f"{folder}: the tokenizer has no token {token!r}, which ends turns in the template of prompt_type")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name == "tokenizer_config.json" or (folder / name).is_file():
            _update_json(folder / name, {"eos_token": token})
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    earlier = generation.get("eos_token_id", config.get("eos_token_id"))
    earlier_ids = earlier if isinstance(earlier, list) else [] if earlier is None else [earlier]
    stops = [token_id, *(one for one in earlier_ids if one != token_id)]
    _update_json(folder / "generation_config.json", {"eos_token_id": stops if len(stops) > 1 else token_id})
    text = config.get("text_config")
    changes: dict[str, Any] = {"eos_token_id": token_id}
    if isinstance(text, dict) and "eos_token_id" in text:
        changes["text_config"] = {**text, "eos_token_id": token_id}
    _update_json(folder / "config.json", changes)


def _update_json(path: Path, changes: Mapping[str, Any]) -> None:
    write_json(path, {**(read_json(path) if path.is_file() else {}), **changes})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as files of an HF folder have it."""
    path.write_text(json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    write_json(folder / "config.json", config)


def dtype_keys(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Return the config.json entry that states the weights' dtype, under the name this config uses for it."""
    # older transformers write torch_dtype, newer ones dtype
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {key: str(dtype).removeprefix("torch.")}


def mtp_keys(config: Mapping[str, Any], mtp_num_layers: int) -> dict[str, object]:
    """Return the config.json entry that states the number of prediction layers, for a config that has one."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return {name: mtp_num_layers for name in names if name in config}


class HfFolderWriter:
    """Writes an HF folder tensor by tensor; it appears under its name when complete, and not at all after an error.

    Use as a context manager. Memory: one weight file.

    Args:
        path: the folder to make; it must not exist, or be empty.
        companions: HF folder whose config, generation config and tokenizer files are copied.
        config_changes: keys of config.json that differ from the companion folder's.
        max_shard_bytes: size at which a new weight file starts.
        finish: called with the folder once the companion files are in it, to change some of them.

    Raises:
        ValueError: the folder exists and is not empty.
    """

    def __init__(
        self,
        path: str | Path,
        companions: str | Path,
        config_changes: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 5 * 10**9,
        finish: Callable[[Path], object] | None = None,
    ) -> None:
        self.path = Path(path)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"{self.path} exists already; choose a new folder")
        self.companions = Path(companions)
        self.config_changes = dict(config_changes or {})
        self.max_shard_bytes = max_shard_bytes
        self.finish = finish
        # beside it, because a rename works within one file system only
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> HfFolderWriter:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; its bytes are copied to the CPU and written once a file is full."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        # copied: it is written later, and the caller may change or free it before
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        # named at the end, since the names of shards say how many there are
        save_file(self._pending, self.partial / f"part-{len(self._files):05d}", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._complete()
        finally:  # complete, it has another name; a disk that was full at the end leaves nothing either
            shutil.rmtree(self.partial, ignore_errors=True)

    def _complete(self) -> None:
        """Write what is pending, and give the folder its name."""
        if self._pending:
            self._flush()
        weight_map = {}
        count = len(self._files)
        for i, names in enumerate(self._files):
            file_name = _SINGLE_NAME if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self.partial / f"part-{i:05d}", self.partial / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        write_index(self.partial, weight_map, self._total_bytes)
        copy_companions(self.companions, self.partial, self.config_changes)
        if self.finish is not None:
            self.finish(self.partial)
        if self.path.exists():
            self.path.rmdir()
        os.replace(self.partial, self.path)

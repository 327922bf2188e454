"""The part of torch_npu, vllm-ascend, MindSpeed and Megatron that our code uses, and the pinned record of what they offer.

`uses()` reads our own sources. `tests/data/npu/contract.json` holds what each release has under those names. This file makes it
again in some minutes, from the package index and, for MindSpeed, which is in none, from source trees; nothing is installed:

    tests/npu_sim/run.sh --run python tests/unit/npu/contract.py --download FOLDER --mindspeed core_r0.16.0=FOLDER ...

`--check` compares with the committed record in place of writing it. A release that is named (`--torch-npu 2.9.0=WHEEL`: a
wheel, an sdist or a folder) is not downloaded, and a new one is recorded beside the others. Without `--download` all others
keep their record.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.cli.doctor import variables

ROOT = Path(__file__).parents[3]
PINNED = ROOT / "tests" / "data" / "npu" / "contract.json"
#: stands before the keys of ProcessGroupHCCL.Options.hccl_config
HCCL_OPTIONS = "torch_npu.hccl_config."
#: stands before the names of environment variables that a library reads
VARIABLE = "torch_npu.environment."
#: first part of a dotted name -> package whose contract it belongs to
PACKAGES = {"torch_npu": "torch_npu", "mindspeed": "mindspeed", "vllm_ascend": "vllm_ascend", "megatron": "megatron"}
#: package of the record -> its name on the package index
ON_INDEX = {"torch_npu": "torch-npu", "vllm_ascend": "vllm-ascend", "vllm": "vllm", "megatron": "megatron-core"}
#: wheels, for a newer Python too; then sources, of whose setup.py pip asks for the version
_WHEELS = (("--only-binary", ":all:"), ("--only-binary", ":all:", "--python-version", "3.12"))
_SOURCES = ("--no-binary", ":all:", "--no-build-isolation")
#: read by setup.py: no device, nothing to build
_NOTHING_BUILT = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1", "VLLM_TARGET_DEVICE": "empty"}


@dataclass(frozen=True)
class Use:
    """A name of another package in our code.

    Attributes:
        name: full dotted name; `torch.npu.x` is written `torch_npu.npu.x`.
        where: file and line.
        keywords, positional: of a call, None when it is not called there or passes * or **.
    """

    name: str
    where: str
    keywords: tuple[str, ...] | None = None
    positional: int | None = None


# ---------------------------------------------------------------- what our code uses


def uses(package: Path) -> list[Use]:
    """Every use of a foreign name in a package of ours."""
    results: list[Use] = []
    for path in sorted(package.rglob("*.py")):
        results += _uses_of_file(path, package.parent)
    return results


def _uses_of_file(path: Path, root: Path) -> Iterator[Use]:
    tree = ast.parse(path.read_text())
    aliases: dict[str, str] = {"torch_npu": "torch_npu"}
    for_types = _find_type_imports(tree)
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0 and node.module.split(".")[0] in PACKAGES:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{node.module}.{alias.name}", _place(path, root, node))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    aliases[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
                    if "." in alias.name:
                        yield Use(alias.name, _place(path, root, node))
    yield from _named_in_strings(tree, path, root)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            name = _full_name(node, aliases)
            if name is None or "." not in name:
                continue
            call = calls.get(id(node))
            if call is None or any(isinstance(argument, ast.Starred) for argument in call.args):
                yield Use(name, _place(path, root, node))
            else:
                keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
                yield Use(name, _place(path, root, node), keywords, len(call.args))


def _find_type_imports(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes below `if TYPE_CHECKING:`: what is imported there is not used at run time."""
    blocks = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
    ]
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


def _named_in_strings(tree: ast.Module, path: Path, root: Path) -> Iterator[Use]:
    """Modules that are imported by name, and keys of HCCL's options, which are a plain dict."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if node.func.attr == "import_module" and isinstance(first, ast.Constant) and "." in first.value:
                if first.value.split(".")[0] in PACKAGES:
                    yield Use(first.value, _place(path, root, node))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and isinstance(node.value, ast.Dict):
            if node.targets[0].attr == "hccl_config":
                for key in node.value.keys:
                    yield Use(f"{HCCL_OPTIONS}{ast.literal_eval(key)}", _place(path, root, node))


def _place(path: Path, root: Path, node: ast.AST) -> str:
    return f"{path.relative_to(root)}:{node.lineno}"


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    parts.reverse()
    if parts[:2] == ["torch", "npu"]:
        return ".".join(["torch_npu", "npu", *parts[2:]])
    # the modules of every device kind that a platform uses
    if parts[0] == "self" and len(parts) > 2 and parts[1] in ("device_module", "rng_module"):
        return ".".join(["torch_npu", "npu", *parts[2:]])
    if parts[0] not in aliases:
        return None
    return ".".join([aliases[parts[0]], *parts[1:]])


# ---------------------------------------------------------------- what a source tree offers


class SourceTree:
    """Names and signatures of a package by reading its sources, without importing it."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the one that holds the top-level package."""
        self.folder = folder

    def module(self, name: str) -> Path | None:
        """File of a module, or folder of a namespace package."""
        base = self.folder.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return base if base.is_dir() else None

    def signature(self, name: str) -> str | None:
        """Arguments of a function or class in parentheses, "" for anything else that exists, None for what does not."""
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            path = self.module(".".join(parts[:cut]))
            if path is not None:
                return "" if cut == len(parts) else self._inside(path, ".".join(parts[:cut]), parts[cut:])
        return None

    def _inside(self, path: Path, module: str, parts: list[str]) -> str | None:
        if path.is_dir():
            return None
        node = _top_level(ast.parse(path.read_text(errors="replace"))).get(parts[0])
        if node is None:
            return self._from_star(path, module, parts)
        if isinstance(node, ast.ImportFrom):
            alias = next(alias for alias in node.names if (alias.asname or alias.name) == parts[0])
            source = _absolute(node, module, is_package=path.name == "__init__.py")
            result = self.signature(".".join([source, alias.name, *parts[1:]]))
            return "" if result is None and self.module(source) is None else result  # compiled, or another package
        if len(parts) > 1:
            return self._member(node, parts[1:])
        return _arguments(node)

    def _from_star(self, path: Path, module: str, parts: list[str]) -> str | None:
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                result = self.signature(".".join([_absolute(node, module, is_package=path.name == "__init__.py"), *parts]))
                if result is not None:
                    return result
        return None

    def _member(self, node: ast.AST, parts: list[str]) -> str | None:
        if not isinstance(node, ast.ClassDef):
            return ""  # an attribute of an object: out of reach without running it
        member = _top_level(node).get(parts[0])
        if member is None:
            return "" if node.bases else None
        return _arguments(member)


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _top_level(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    names: dict[str, ast.AST] = {}

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names[node.name] = node
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    names[(alias.asname or alias.name).split(".")[0]] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            names[part.id] = node
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                visit(node.body)
                visit(getattr(node, "orelse", []))
                for handler in getattr(node, "handlers", []):
                    visit(handler.body)

    visit(tree.body)
    return names


def _arguments(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        init = _top_level(node).get("__init__")
        if init is not None:
            return _arguments(init)
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        if not node.bases and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return "(" + ", ".join(ast.unparse(field.target) + ("=..." if field.value else "") for field in fields) + ")"
        return ""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if any(
            "contextmanager" not in ast.unparse(decorator) and "wraps" in ast.unparse(decorator)
            for decorator in node.decorator_list
        ):
            return ""
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
            if argument is not None:
                argument.annotation = None
        text = ast.unparse(arguments)
        return "(" + re.sub(r"^(self|cls)(, |$)", "", text) + ")"
    return ""


def accepts(signature: str, keywords: tuple[str, ...], positional: int) -> str | None:
    """What is wrong with a call, or None. The signature is Python's or a torch schema's, with its parentheses."""
    required: list[str] = []
    names: list[str] = []
    count = 0
    keyword_only = False
    for part in _split(signature[1:-1]):
        if part.startswith("**"):
            return None
        if part.startswith("*"):
            keyword_only = True
            if len(part) > 1:
                return None
            continue
        if part == "/":
            continue
        name = part.split("=")[0].split(":")[0].split()[-1]
        names.append(name)
        count += not keyword_only
        if "=" not in part:
            required.append(name)
    unknown = [keyword for keyword in keywords if keyword not in names]
    if unknown:
        return f"has no argument {', '.join(unknown)}"
    if positional > count:
        return f"takes {count} positional arguments, {positional} are given"
    missing = [name for name in required if name not in keywords and name not in names[:positional]]
    return f"needs {', '.join(missing)}" if missing else None


def _split(signature: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(signature):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(signature[start:index].strip())
            start = index + 1
    return [part for part in [*parts, signature[start:].strip()] if part]


# ---------------------------------------------------------------- making the record


def operator_schemas(library: Path) -> dict[str, str]:
    """Argument lists of the `npu_*` operators whose schemas are stored as text in the compiled library."""
    text = library.read_bytes()
    schemas: dict[str, str] = {}
    for result in re.finditer(rb"(?<![\w.])(npu_\w+)\(([^\x00]{0,4000}?)\) -> ", text):
        schemas.setdefault(result[1].decode(), f"({result[2].decode()})")
    return schemas


def _unpacked(source: str, into: Path) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    if path.name.endswith(".tar.gz"):  # a release without wheels; its package is one folder further in
        with tarfile.open(path) as archive:
            archive.extractall(into, [member for member in archive if member.name.endswith(".py")], filter="data")
        return into / path.name.removesuffix(".tar.gz")
    with zipfile.ZipFile(path) as wheel:
        members = [name for name in wheel.namelist() if name.endswith((".py", "libtorch_npu.so")) or "/_C." in name]
        wheel.extractall(into, members)
    return into


def record_torch_npu(folder: Path, names: set[str]) -> dict[str, str]:
    """Signatures of the used names in one torch_npu."""
    tree = SourceTree(folder)
    schemas = operator_schemas(folder / "torch_npu" / "lib" / "libtorch_npu.so")
    library = (folder / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()
    # the module of some releases only loads the library, which then has its names
    binary = library + b"".join(path.read_bytes() for path in (folder / "torch_npu").glob("_C*.so"))
    record: dict[str, str] = {}
    for name in sorted(names):
        last = name.split(".")[-1]
        if name.startswith("torch_npu.npu_") and last in schemas:
            record[name] = schemas[last]
        elif name.startswith(HCCL_OPTIONS):
            if b"\0" + last.encode() + b"\0" in library:
                record[name] = ""
        elif name.startswith("torch_npu._C."):
            if last.encode() in binary:
                record[name] = ""
        elif (signature := tree.signature(name)) is not None:
            record[name] = signature
        elif tree.signature(name.rpartition(".")[0]) is not None and last.encode() in binary:
            record[name] = ""  # a member of a class that is compiled
    return record | {f"{VARIABLE}{name}": "" for name in sorted(variables._NAMES) if b"\0" + name.encode() + b"\0" in library}


#: class of vllm-ascend's exchange by all-gather
ALL_GATHER = "TokenDispatcherWithAllGather"


def record_vllm_ascend(folder: Path) -> dict[str, object]:
    """Keys of additional_config, environment variables and methods that the suite relies on, of one vllm-ascend."""
    sources = [path.read_text(errors="replace") for path in (folder / "vllm_ascend").rglob("*.py")]
    text = "\n".join(sources)
    keys = set(re.findall(r"additional_config\.get\(\s*[\"'](\w+)", text)) | set(
        re.findall(r"additional_config\[[\"'](\w+)", text)
    )
    keys |= set(re.findall(r"_get_config_value\(\s*additional_config,\s*[\"'](\w+)", text))
    config = _top_level(ast.parse((folder / "vllm_ascend" / "ascend_config.py").read_text()))
    keys |= set(_fields(config["AscendConfig"]))  # from 0.27 on, where unknown ones are errors
    variables = set(re.findall(r"[\"'](VLLM_ASCEND_\w+|VLLM_BATCH_INVARIANT|VLLM_VERSION)[\"']", text))
    worker = ast.parse((folder / "vllm_ascend" / "worker" / "worker.py").read_text())
    methods = next(node for node in worker.body if isinstance(node, ast.ClassDef) and node.name == "NPUWorker")
    calls = {
        node.name: _arguments(node)
        for node in methods.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    latent = (folder / "vllm_ascend" / "attention" / "mla_v1.py").read_text()
    kernel = next(node for node in ast.parse(latent).body if isinstance(node, ast.ClassDef) and node.name == "AscendMLAImpl")
    defaults = re.search(r"class EplbConfig.*?_defaults = \{(.*?)\n    \}", text, re.DOTALL)
    balancer = _fields(config["EplbConfig"]) or re.findall(r"[\"'](\w+)[\"']:", defaults[1] if defaults else "")
    context = (folder / "vllm_ascend" / "ascend_forward_context.py").read_text()
    fused = folder / "vllm_ascend" / "ops" / "fused_moe"
    dispatchers = (fused / "token_dispatcher.py").read_text()
    classes = [node for path in fused.rglob("*.py") for node in ast.parse(path.read_text()).body]
    routing = next((fields for fields in map(set, map(_fields, classes)) if {"mc2_mask", "log2phy"} <= fields), set())
    proposers = [ast.parse(path.read_text()) for path in (folder / "vllm_ascend" / "spec_decode").glob("*proposer.py")]
    joins = [
        node.name
        for tree in proposers
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "_maybe_share_lm_head" in _top_level(node)
    ]
    sampler = _top_level(ast.parse((folder / "vllm_ascend" / "sample" / "sampler.py").read_text()))
    kept = ("sleep", "wake_up", "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
    return {
        "additional_config": sorted(keys),
        "environment": sorted(variables),
        "worker": {name: calls[name] for name in kept if name in calls},
        "sampler": {"random_sample": _arguments(sampler["random_sample"])},
        "eplb_config": sorted(balancer),
        "rl_config": sorted(_fields(config["RlConfig"])) if "RlConfig" in config else [],
        "drafts": sorted(joins),
        "exchange": {
            "select_moe_comm_method": _arguments(_top_level(ast.parse(context))["select_moe_comm_method"]),
            "types": sorted(re.findall(r"^    (\w+) = \d", context, re.M)),
            "token_dispatch": _arguments(_top_level(_top_level(ast.parse(dispatchers))[ALL_GATHER])["token_dispatch"]),
            "routing": sorted({"expert_map", "log2phy"} & routing),
        },
        "latent_attention": {
            "process_weights_after_loading": _arguments(_top_level(kernel)["process_weights_after_loading"]),
            "attributes": sorted(set(re.findall(r"self\.(W_UV|W_UK_T|kv_b_proj)\b", latent))),
        },
    }


def _fields(node: ast.AST) -> list[str]:
    """Names of the fields of a dataclass."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [item.target.id for item in body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]


def record_vllm(folder: Path) -> dict[str, object]:
    """How one vLLM places a replica among those that share experts that an external launcher made; its forms of penalties."""
    parallel = (folder / "vllm" / "config" / "parallel.py").read_text()
    engine = (folder / "vllm" / "v1" / "engine" / "llm_engine.py").read_text()
    variables = (folder / "vllm" / "envs.py").read_text()
    operators = (folder / "vllm" / "_custom_ops.py").read_text()
    return {
        "environment": sorted(set(re.findall(r"\"(VLLM_DP_\w+|VLLM_BATCH_INVARIANT)\":", variables))),
        "placed_by": dict(re.findall(r"self\.(data_parallel_\w+) = envs\.(VLLM_DP_\w+)", parallel)),
        "penalties": sorted(re.findall(r"^def (apply_repetition_penalties\w*)\(", operators, re.M)),
        "keeps_replicas_in_step": "external_launcher_dp" in engine and "execute_dummy_batch" in engine,
    }


def record_mindspeed(folder: Path, names: set[str]) -> dict[str, object]:
    """Arguments that features register, arguments they read, and signatures of the used names."""
    registered: set[str] = set()
    read: set[str] = set()
    for path in (folder / "mindspeed").rglob("*.py"):
        text = path.read_text(errors="replace")
        registered |= {option.replace("-", "_") for option in re.findall(r"add_argument\(\s*[\"']--([\w-]+)", text)}
        read |= set(re.findall(r"(?:args|config)\.(\w+)", text)) | set(
            re.findall(r"getattr\(\s*(?:\w+\.)?(?:args|config|self\.config),\s*[\"'](\w+)", text)
        )
        read |= {feature.replace("-", "_") for feature in re.findall(r"super\(\S*\)\.__init__\(\s*[\"']([\w-]+)", text)}
    tree = SourceTree(folder)
    results = {name: tree.signature(name) for name in sorted(names)}
    return {
        "arguments": sorted(registered),
        "read_arguments": sorted(read - registered),
        "names": {name: signature for name, signature in results.items() if signature is not None},
    }


def record_megatron(folder: Path, names: set[str]) -> dict[str, str]:
    """Signatures of the used names."""
    tree = SourceTree(folder)
    results = {name: tree.signature(name) for name in sorted(names)}
    return {name: signature for name, signature in results.items() if signature is not None}


def names_of(package: str) -> set[str]:
    """Names of one foreign package that our code uses."""
    return {use.name for use in _our_uses() if use.name.split(".")[0] == package}


@functools.cache
def _our_uses() -> tuple[Use, ...]:
    return tuple(uses(ROOT / "mindspeed_rl"))


def download(package: str, version: str, into: Path) -> Path:
    """A release of the package index, once: its wheel, or its sources where it has none; of vLLM always its sources."""
    name = ON_INDEX[package]
    folder = into / f"{name}-{version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"{name}=={version}"]
    environment = os.environ | _NOTHING_BUILT | {"VLLM_VERSION_OVERRIDE": version, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    messages = []
    for form in (_SOURCES,) if package == "vllm" else (*_WHEELS, _SOURCES):
        if found := [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
            return found[0]
        ended = subprocess.run([*command, *form], env=environment, capture_output=True, text=True, check=False)
        messages.append(ended.stderr)
    if found := [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
        return found[0]
    raise SystemExit(f"pip found no {name} {version}:\n" + "\n".join(messages))


def make_record(sources: dict[str, dict[str, str]], names: Collection[str] | None = None) -> dict[str, dict[str, object]]:
    """The record of package -> version -> wheel, sdist or folder, with the names that our code uses or with `names`."""
    makers: dict[str, Callable[[Path, set[str]], object]] = {
        "torch_npu": record_torch_npu,
        "vllm_ascend": lambda folder, _: record_vllm_ascend(folder),
        "vllm": lambda folder, _: record_vllm(folder),
        "mindspeed": record_mindspeed,
        "megatron": record_megatron,
    }
    result: dict[str, dict[str, object]] = {}
    for package, versions in sources.items():
        wanted = names_of(package) if names is None else {name for name in names if not name.startswith(VARIABLE)}
        for version, source in versions.items():
            with tempfile.TemporaryDirectory() as scratch:
                result.setdefault(package, {})[version] = makers[package](_unpacked(source, Path(scratch)), wanted)
    return result


def differences(committed: object, made: object, path: str = "") -> Iterator[str]:
    """One line for each value of two records that is not the same."""
    if isinstance(committed, dict) and isinstance(made, dict):
        for key in sorted({*committed, *made}):
            yield from differences(committed.get(key), made.get(key), f"{path} {key}".strip())
    elif isinstance(committed, list) and isinstance(made, list) and committed != made:
        yield f"{path}: gone {sorted({*committed} - {*made})}, new {sorted({*made} - {*committed})}"
    elif committed != made:
        yield f"{path}: committed {committed!r}, made {made!r}"


def main() -> int:
    """Writes contract.json, or compares with it."""
    parser = argparse.ArgumentParser(description="Regenerate tests/data/npu/contract.json.")
    packages = ("torch_npu", "vllm_ascend", "vllm", "mindspeed", "megatron")
    for package in packages:
        option = f"--{package.replace('_', '-')}"
        parser.add_argument(option, nargs="+", default=[], metavar="VERSION=WHEEL_OR_FOLDER")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="place of the releases that are not named")
    parser.add_argument("--check", action="store_true", help="compare with the committed record, and write nothing")
    arguments = parser.parse_args()
    record = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    sources = {package: dict(value.split("=", 1) for value in getattr(arguments, package)) for package in packages}
    if arguments.download:
        for package in ON_INDEX:
            for version in record.get(package, {}):
                if version not in sources[package]:
                    sources[package][version] = str(download(package, version, arguments.download))
    made = make_record(sources)
    if arguments.check:
        committed = {package: {version: record.get(package, {}).get(version) for version in made[package]} for package in made}
        found = list(differences(committed, made))
        print(*found, sep="\n", end="\n" if found else "")
        print(f"{sum(map(len, made.values()))} releases compared, {len(found)} differences")
        return 1 if found else 0
    for package, versions in made.items():
        record.setdefault(package, {}).update(versions)
    PINNED.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

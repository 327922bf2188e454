"""Whatever a command is given, it says so in sentences and ends with 2, or does it: 500 cases from fixed seeds."""

from __future__ import annotations

import contextlib
import io
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import yaml

from mindspeed_rl.cli.main import main
from mindspeed_rl.config.keys import collect_keys
from mindspeed_rl.config.run_files import find_project_configs

#: dotted names of the keys that are numbers within a range
RANGED = [path for path, key in collect_keys().items() if key.range is not None]

#: of one case; the slowest took 1.5 s
_LIMIT_S = 20

NUMBERS = [0, -1, 1, 2, 3, 7, -7, 2**31, 2**63, 2**70, 10**30, -(10**30), 0.5, -0.5, 1e-320, 1e308]
WORDS: list[object] = [
    "",
    "nan",
    "inf",
    "null",
    "true",
    "a b",
    "\x00",
    "é",
    "𝄞",
    "../..",
    "/",
    "~",
    "${x}",
    "{{",
    "os:system",
    "x" * 5000,
]
SHAPES: list[object] = [None, True, [], [1], [[]], ["a", 1], {}, {"a": 1}, [None], {"a": {"b": [1]}}]


class StillRunning(BaseException):
    """A case took longer than it may."""


@contextlib.contextmanager
def limited(case: str) -> Iterator[None]:
    def late(signum: int, frame: FrameType | None) -> None:
        raise StillRunning(case)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def says(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with 0, or with 2 and words; it raises nothing else."""
    out, errors = io.StringIO(), io.StringIO()
    case = repr(words)[:600]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with limited(case), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(words)
        except SystemExit as ending:
            code = ending.code
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:300]}") from error
    said = out.getvalue() + errors.getvalue()
    assert code in (0, 2), f"{case}: ended with {code}: {said[-500:]}"
    assert "Traceback" not in said, f"{case}: {said[-2000:]}"
    assert code == 0 or said.strip(), f"{case}: says nothing"


def value(chance: random.Random) -> object:
    return chance.choice([chance.choice(NUMBERS), chance.choice(WORDS), chance.choice(SHAPES)])


def changed_tree(chance: random.Random) -> dict:
    """A shipped run file with one to four keys or groups changed, removed or added."""
    name = chance.choice(["grpo_tiny_cpu", "sft_tiny_cpu"])
    tree = yaml.safe_load((find_project_configs() / f"{name}.yaml").read_text())
    groups = [group for group in tree if isinstance(tree[group], dict)]
    for _ in range(chance.randint(1, 4)):
        group, what = chance.choice(groups), chance.random()
        if not isinstance(tree.get(group), dict):
            continue
        if what < 0.1:
            tree[group] = value(chance)
        elif what < 0.2:
            tree.pop(group)
        elif what < 0.3 and tree[group]:
            tree[group].pop(chance.choice(list(tree[group])))
        elif what < 0.6 and tree[group]:
            tree[group][chance.choice(list(tree[group]))] = value(chance)
        else:
            path = chance.choice([path for path in RANGED if path.count(".") == 1])
            tree.setdefault(path.split(".")[0], {})
            if isinstance(tree[path.split(".")[0]], dict):
                tree[path.split(".")[0]][path.split(".")[1]] = value(chance)
    return tree


@pytest.mark.parametrize("seed", range(6))
def test_run_files_with_changed_values(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    for number in range(25):
        (tmp_path / f"f{number}.yaml").write_text(yaml.safe_dump(changed_tree(chance), allow_unicode=True))
        says(["explain", "--config-name", f"f{number}", "--config-dir", str(tmp_path)], monkeypatch)


def test_run_files_with_changed_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    whole = (find_project_configs() / "grpo_tiny_cpu.yaml").read_bytes()
    for number in range(150):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(len(content))
            content[place : place + chance.randint(0, 3)] = bytes(
                chance.choice([chance.randrange(256), *b"[]{}:,&*!|>-%@`'\"\n\t #"]) for _ in range(chance.randint(0, 3))
            )
        (tmp_path / f"b{number}.yaml").write_bytes(content[: chance.choice([None, chance.randrange(len(content))])])
        says(["explain", "--config-name", f"b{number}", "--config-dir", str(tmp_path)], monkeypatch)


def test_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(8)
    keys = [path for path in RANGED if "\x00" not in path] + [
        "model",
        "defaults",
        "hydra.run.dir",
        "a.b",
        "=",
        "",
        "+",
        "~x",
        "@",
    ]
    for _ in range(60):
        items = [f"{chance.choice(keys)}={value(chance)}" for _ in range(chance.randint(1, 3))]
        says(["explain", "--config-name", "grpo_tiny_cpu", "--", *items], monkeypatch)


#: command -> options that take a value; none of these cases may reach a model
OPTIONS = {
    "convert": ["--model-type", "--load-dir", "--save-dir", "--model-type-hf", "--load-model-type", "--save-model-type",
                "--target-tensor-parallel-size", "--max-shard-size", "--load-iteration", "--make-vocab-size-divisible-by",
                "--num-layer-list"],
    "preprocess": ["--input", "--output-prefix", "--handler-name", "--tokenizer-name-or-path", "--workers", "--seq-length",
                   "--prompt-type", "--on-bad-row", "--map-keys"],
    "generate": ["--load", "--prompt", "--max-new-tokens", "--temperature", "--top-k", "--task", "--tensor-parallel-size"],
    "evaluate": ["--load", "--task", "--task-data-path", "--max-new-tokens", "--tensor-parallel-size"],
    "parity": ["--dtype", "--output"],
    "launch": ["--nodes", "--npus-per-node", "--hosts", "--node-rank", "--port", "--timeout", "--token-file", "--check-path"],
    "doctor": ["--log", "--platform", "--line"],
    "train": ["--config-name", "--config-dir", "--nodes"],
}  # fmt: skip


@pytest.mark.parametrize("command", OPTIONS)
def test_command_lines(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(f"{command} 1")
    (tmp_path / "garbage.jsonl").write_bytes(bytes(range(256)))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "config.json").write_text("[1]")
    texts = [
        *map(str, NUMBERS),
        *(str(word) for word in WORDS if "\x00" not in str(word)),
        "garbage.jsonl",
        "deep.json",
        ".",
        "nope",
    ]
    for _ in range(18):
        words = [command]
        for option in chance.sample(OPTIONS[command], chance.randint(1, min(5, len(OPTIONS[command])))):
            words += [option, chance.choice(texts)]
        says(words, monkeypatch)
    left = {path.name for path in tmp_path.rglob("*")} - {"garbage.jsonl", "deep.json", "config.json"}
    assert not [name for name in left if "partial" in name or name.endswith((".bin", ".idx", ".safetensors"))]

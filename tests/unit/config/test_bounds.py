"""Every number of a run file has bounds, and what lies outside is refused in a sentence."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.explain import main
from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.config.keys import collect_keys, find_range
from mindspeed_rl.config.run_files import find_project_configs

#: numbers inside text or lists with rules of their own, which name each part: weights next to prefixes, layers of stages
OTHER_RULES = {f"megatron_training.{name}" for name in ("data_path", "num_layer_list", "noop_layers")}


def is_numeric(kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType, list):
        return any(map(is_numeric, typing.get_args(kind)))
    return kind in (int, float)


NUMBERS = {path: key.default for path, key in collect_keys().items() if is_numeric(key.kind)}


def test_every_number_of_the_schema_has_bounds_that_hold_its_default() -> None:
    assert {name for name in NUMBERS if find_range(name) is None} == OTHER_RULES
    for name, default in NUMBERS.items():
        bounds = find_range(name)
        if bounds is not None:
            assert bounds.low is not None, f"{name} has no lower bound"
            for value in default if isinstance(default, list) else [default]:
                assert value is None or isinstance(value, str) or bounds.contain(value), f"{name}: {value}"
    assert {path for path, key in collect_keys().items() if key.range is not None} <= NUMBERS.keys()
    assert find_range("critic_config.lr") == find_range("megatron_training.lr")


def refusal(*overrides: str) -> str:
    """What `explain` prints of the tiny run file with these changes; it has to refuse them."""
    import contextlib
    import io

    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        code = main(["--config-name", "grpo_tiny_cpu", *overrides])
    assert code == 2, console.getvalue()
    return console.getvalue()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor_config.adam_beta2=1.5", "adam_beta2 (1.5) must be at least 0 and less than 1"),
        ("actor_config.adam_beta2=-1", "adam_beta2 (-1) must be at least 0"),
        ("actor_config.weight_decay=-1", "weight_decay (-1) must be at least 0"),
        ("actor_config.min_lr=1", "actor_config.min_lr (1) must be at most actor_config.lr"),
        ("megatron_training.seq_length=-1", "seq_length (-1) must be at least 1"),
        ("generate_config.max_num_batched_tokens=-1", "max_num_batched_tokens (-1) must be at least 1"),
        (f"megatron_training.seed={2**70}", "seed (1.18059e+21) must be at least 0 and at most 4294967295"),
        ("megatron_training.save_interval=0", "save_interval (0) must be at least 1"),
        ("megatron_training.save_interval=-5", "save_interval (-5) must be at least 1"),
        ("generate_config.sampling_config.top_k=-7", "top_k (-7) must be at least -1"),
        ("rl_config.log_probs_diff_limit=-1", "log_probs_diff_limit (-1) must be greater than 0"),
        ("rl_config.verifier_function=[nope]", "unknown reward function 'nope'"),
        ("rl_config.num_reward_workers=100000", "num_reward_workers (100000) must be at least 1 and at most 4096"),
        (f"megatron_training.global_batch_size={10**30}", "global_batch_size (1e+30) must be at least 1 and at most 1e+07"),
        ("megatron_training.data_path=[1]", "data_path is a list, but reinforcement learning reads one prefix or file"),
        ("actor_config=null", "the group actor_config is missing or empty"),
        ("~actor_config", "the group actor_config is missing or empty"),
        ("actor_config.tensor_model_parallel_size=1000000000", "at most 4096"),
        ("rl_config.verifier_weight=[1e9]", "verifier_weight (1e+09) must be at least -1e+06"),
        ("actor_config.lr=nan", "actor_config.lr is nan"),
    ],
)
def test_explain_refuses(override: str, said: str) -> None:
    assert said in refusal(override)


def test_every_number_outside_is_named_and_so_are_broken_rules() -> None:
    said = refusal("actor_config.adam_beta1=2", "rl_config.epochs=0", "actor_config.min_lr=1")
    assert "adam_beta1 (2)" in said and "rl_config.epochs (0)" in said and "min_lr (1) must be at most" in said


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "binary": (bytes(range(256)), "is not UTF-8 text (byte 128 is 0x80)"),
    "latin-1": ("megatron_training: {model: \xe9}".encode("latin-1"), "is not UTF-8 text"),
    "UTF-16": ("megatron_training: {}".encode("utf-16"), "is not UTF-8 text"),
    "3000 levels": (b"a: " + b"[" * 3000 + b"]" * 3000, "nested"),
    "an alias bomb": (
        b"a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 12)),
        "stands for more than 100000 values",
    ),
    "a list": (b"[1, 2]", "cannot be read"),
    "a bell": (b"a: \x07", "cannot be read"),
    "too large": (b"#" * (2 << 20), "bytes, more than"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_run_file_is_named(tmp_path: Path, name: str) -> None:
    content, said = BAD_FILES[name]
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_run_config("bad", tmp_path)
    assert said in str(caught.value) and "bad" in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5000, "a\x00b", "", ".", "..", "\udcff"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ConfigError):
        load_run_config(name, find_project_configs())

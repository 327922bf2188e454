"""`explain` refuses all that `train` refuses before its workers start: both run the same two stages of checks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from supervised_samples import text

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.run.models import plan_models, resolve_run
from mindspeed_rl.trainers.rl_setup import check_rl

_PROMPT = "".join(text(number) for number in (5, 6, 7))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with model/, train.jsonl and run.yaml, with which a run would start."""
    folder = tmp_path_factory.mktemp("task")
    _copy_model(tiny_model, folder / "model", head_dim=32)
    (folder / "train.jsonl").write_text((json.dumps({"prompt": _PROMPT, "labels": "a"}) + "\n") * 40)
    tree: dict[str, Any] = {
        "platform": "cpu",
        "run_dir": str(folder / "run"),
        "megatron_training": {
            "stage": "ray_grpo",
            "bf16": False,
            "global_batch_size": 8,
            "train_iters": 3,
            "data_path": str(folder / "train.jsonl"),
            "dataset_additional_keys": ["labels"],
            "tokenizer_name_or_path": str(folder / "model"),
        },
        "actor_config": {"micro_batch_size": 8, "lr": 1e-4, "finetune": True, "load": str(folder / "model")},
        "rl_config": {
            "actor_resource": {"num_npus": 1},
            "n_samples_per_prompt": 4,
            "mini_batch_size": 8,
            "max_prompt_length": 16,
            "use_remove_padding": True,
            "verifier_function": ["exact_match"],
        },
        "generate_config": {"dtype": "float32", "max_model_len": 32, "sampling_config": {"max_tokens": 8}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder


def _copy_model(source: Path, folder: Path, **config: object) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def _name(model: Path) -> list[str]:
    return [f"actor_config.load={model}", f"megatron_training.tokenizer_name_or_path={model}"]


def _unsupported(task: Path, folder: Path) -> list[str]:
    return _name(_copy_model(task / "model", folder / "m", architectures=["WhisperForX"], model_type="whisper"))


def _adapter(task: Path, folder: Path) -> list[str]:
    model = _copy_model(task / "model", folder / "m")
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    return [f"actor_config.load={model}"]


def _lora(*changes: str, width: int | None = None) -> Callable[[Path, Path], list[str]]:
    """An adapter of rank 2 on queries and values of the first layer, which is trained on."""

    def write(task: Path, folder: Path) -> list[str]:
        config = json.loads((task / "model" / "config.json").read_text())
        hidden, head = width or config["hidden_size"], config["head_dim"]
        tensors = {}
        for name, heads in (("q", config["num_attention_heads"]), ("v", config["num_key_value_heads"])):
            module = f"base_model.model.model.layers.0.self_attn.{name}_proj"
            tensors[f"{module}.lora_A.weight"] = torch.rand(2, hidden)
            tensors[f"{module}.lora_B.weight"] = torch.rand(heads * head, 2)
        save_file(tensors, folder / "adapter_model.safetensors")
        adapter = {"peft_type": "LORA", "base_model_name_or_path": str(task / "model"), "r": 2, "lora_alpha": 6}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        return [f"actor_config.load={folder}", "actor_config.lora_target_modules=[linear_qkv]", *changes]

    return write


def _narrow_head(task: Path, folder: Path) -> list[str]:
    return _name(_copy_model(task / "model", folder / "m", head_dim=48))


def _three_heads(task: Path, folder: Path) -> list[str]:
    model = _copy_model(task / "model", folder / "m", num_attention_heads=3, num_key_value_heads=3)
    return [*_name(model), "actor_config.tensor_model_parallel_size=2", "rl_config.actor_resource.num_npus=2"]


def _fewer_tokens(*changes: str) -> Callable[[Path, Path], list[str]]:
    """A model with half of the task's tokens, FEW in the changes; the tokenizer stays."""

    def write(task: Path, folder: Path) -> list[str]:
        model = _copy_model(task / "model", folder / "m", vocab_size=64)
        tensors = load_file(model / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:64].clone()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        return [change.replace("FEW", str(model)) for change in changes]

    return write


def _rows(line: str) -> Callable[[Path, Path], list[str]]:
    def write(task: Path, folder: Path) -> list[str]:
        (folder / "rows.jsonl").write_text(f"{line}\n" * 40)
        return [f"megatron_training.data_path={folder / 'rows.jsonl'}"]

    return write


def _keys(*changes: str) -> Callable[[Path, Path], list[str]]:
    return lambda task, folder: [change.replace("TASK", str(task)) for change in changes]


_FILTER = ("rl_config.filter_groups_enable=true", "rl_config.filter_groups_metric=exact_match")
#: what is wrong -> changes of the run, and words of the refusal
REFUSED: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "architecture": (_unsupported, "WhisperForX"),
    "adapter of no base": (_adapter, "actor_config.load: .* is an adapter of x, .* base_model"),
    "adapter of another model": (_lora(width=48), "does not fit"),
    "rank below the adapter's": (_lora("actor_config.lora_r=3"), "lora_r: 3 is too small .* needs 4"),
    "adapter of other layers": (_lora("actor_config.lora_target_modules=[linear_proj]"), "linear_qkv .* not among them"),
    "width of a head": (_narrow_head, "is 48 in"),
    "three heads over two devices": (_three_heads, "tensor_model_parallel_size"),
    "no model": (_keys("actor_config.load=/nowhere/model"), "/nowhere/model"),
    "no tokenizer": (_keys("megatron_training.tokenizer_name_or_path=/nowhere/model"), "/nowhere/model"),
    "tokenizer with more tokens": (
        _fewer_tokens("actor_config.load=FEW"), "lacks .* tokens of text, such as 64 .* give the tokenizer of the model"
    ),
    "tokenizer with more tokens, by transformers' modules": (
        _fewer_tokens("actor_config.load=FEW", "megatron_training.engine=fsdp"), "/m.: it lacks .* tokens of text, such as 64 "
    ),
    "critic with fewer tokens": (
        _fewer_tokens("rl_config.adv_estimator=gae", "critic_config.lr=1e-4", "critic_config.load=FEW"),
        "vocabulary has 64 .*/m.: it lacks .* tokens of text, such as 64 ",
    ),
    "no data": (_keys("megatron_training.data_path=/nowhere/rows.jsonl"), "/nowhere/rows.jsonl"),
    "no held-out data": (_keys("megatron_training.eval_data_path=/nowhere/rows"), "/nowhere/rows"),
    "no reward model": (_keys("rl_config.reward_model=/nowhere/model"), "rl_config.reward_model"),
    "reward model without a score": (_keys("rl_config.reward_model=TASK/model"), "score.weight"),
    "critic without weights": (_keys("rl_config.adv_estimator=gae", "critic_config.lr=1e-4"), "critic_config.load"),
    "critic without a rate": (
        _keys("rl_config.adv_estimator=gae", "critic_config.load=TASK/model", "actor_config.lr=null", "critic_config.lr=null"),
        "lr is not set in critic_config",
    ),
    "actor without a rate": (_keys("actor_config.lr=null"), "lr is not set"),
    "no length": (_keys("megatron_training.train_iters=null"), "train_iters"),
    "no data key": (_keys("megatron_training.data_path=null"), "data_path"),
    "no weights key": (_keys("actor_config.load=null"), "load"),
    "wrong column": (_rows('{"question": "a", "answer": "b"}'), "has no column"),
    "broken rows": (_rows("{oops"), "not valid JSON"),
    "empty data": (_rows(""), "no prompt is left"),
    "prompts too long": (_rows(json.dumps({"prompt": _PROMPT * 10, "labels": "a"})), "no prompt is left"),
    "unknown reward": (_keys("rl_config.verifier_function=[nothing_like_it]"), "nothing_like_it"),
    "plug-in": (_keys("rl_config.external_plugins=[/nowhere/p.py]"), "/nowhere/p.py"),
    "temperature": (_keys("generate_config.sampling_config.temperature=3"), "temperature"),
    "budget of a micro-batch": (
        _keys("rl_config.use_dynamic_bsz=true", "rl_config.max_packing_token_size=23"),
        r"max_packing_token_size \(23\) must be at least 24",
    ),
    "groups that cannot fill": (
        _keys(*_FILTER, "rl_config.filter_groups_train_batch_size=16", "rl_config.filter_groups_max_batches=1"), "never fills",
    ),
    "groups of one": (
        _keys(*_FILTER, "rl_config.n_samples_per_prompt=1", "rl_config.adv_estimator=reinforce_plus_plus"),
        "none does",
    ),
    "four stages of two layers": (
        _keys("actor_config.pipeline_model_parallel_size=4", "rl_config.actor_resource.num_npus=4"),
        "pipeline size 4",
    ),
    "experts of a dense model": (
        _keys("actor_config.expert_model_parallel_size=2", "rl_config.actor_resource.num_npus=2"),
        "num_experts",
    ),
    "length of the model": (_keys("generate_config.max_model_len=4096"), "max_model_len"),
    "checkpoint": (_keys("actor_config.load_iteration=5"), "load_iteration"),
    "run folder is a file": (_keys("run_dir=TASK/train.jsonl"), "run_dir.*is not a folder"),
    "save folder is a file": (_keys("actor_config.save=TASK/train.jsonl/save"), "save.*is not a folder"),
    "tracker": (_keys("rl_config.report_to=[nothing_like_it]"), "nothing_like_it"),
    "blank path": (_keys("actor_config.save='  '"), "names no file or folder"),
    "platform": (_keys("platform=0"), "platform is 0"),
    "unavailable feature": (_keys("rl_config.trainer_mode=async"), "trainer_mode"),
    "too many devices": (_keys("rl_config.actor_resource.num_npus=100000000"), "num_npus"),
}


def _train_checks(task: Path, changes: list[str]) -> list[str]:
    """The checks of `train` up to the start of Ray."""
    try:
        check_rl(resolve_run(load_run_config(str(task / "run.yaml"), None, changes), 1))
    except ConfigError as error:
        return error.errors
    except ValueError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("name", ["nothing", *REFUSED])
def test_explain_refuses_what_train_refuses(task: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = REFUSED.get(name, (_keys(), ""))
    changes = make(task, tmp_path)
    refused = _train_checks(task, changes)
    capsys.readouterr()
    codes = [explain(["--config-name", str(task / "run.yaml"), *flags, *changes]) for flags in ([], ["--validate"])]
    output = capsys.readouterr().out
    if name == "nothing":
        assert refused == [] and codes == [0, 0], output
        return
    assert codes == [2, 2] and refused
    assert any(re.search(words, text) for text in refused), refused
    assert all(text in output for text in refused[:1]) or "tensor_model_parallel_size" in words
    assert not (task / "run").exists(), "a check writes nothing"


def test_an_adapter_is_trained_on_with_the_rank_that_it_needs_and_merged_for_the_reference(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = _lora()(task, tmp_path)
    run = plan_models(resolve_run(load_run_config(str(task / "run.yaml"), None, changes), 1))
    actor, reference = run.models["actor"], run.models["ref"]
    # two adapters of rank 2 with scale 3, which are one of rank 4
    assert (actor.config.lora_r, actor.config.lora_alpha) == (4, 12)
    assert actor.source.adapter == reference.source.adapter == tmp_path
    assert actor.source.weights == reference.source.weights == task / "model"
    assert reference.config.lora_target_modules is None
    capsys.readouterr()
    assert explain(["--config-name", str(task / "run.yaml"), *changes]) == 0
    words = capsys.readouterr().out
    assert f"the base of the adapter in {tmp_path}, which trains on" in words and "which is merged into it" in words


def test_a_processor_without_exact_products_is_refused_before_anything_starts(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    multiply = torch.mm

    def add_up_every_fourth_row_backwards(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        out = multiply(rows, matrix)
        out[3::4] = multiply(rows.flip(1), matrix.flip(0))[3::4]
        return out

    changes = ["rl_config.exact_log_probs=true"]
    assert _train_checks(task, changes) == []
    monkeypatch.setattr(torch, "mm", add_up_every_fourth_row_backwards)
    (refused,) = _train_checks(task, changes)
    assert refused.startswith("rl_config.exact_log_probs: products of torch.float32 on this processor depend on")
    capsys.readouterr()
    assert explain(["--config-name", str(task / "run.yaml"), "--validate", *changes]) == 2
    assert capsys.readouterr().out.strip() == f"error: {refused}"


def test_without_the_files_of_a_run_its_keys_are_checked(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = [f"{key}=/nowhere/x" for key in ("actor_config.load", "megatron_training.tokenizer_name_or_path")]
    away.append("megatron_training.data_path=/nowhere/rows")
    words = ["--config-name", str(task / "run.yaml"), *away]
    assert explain(words) == 0 and "none that the run names is on this machine" in capsys.readouterr().out
    assert explain([*words, "--validate"]) == 2
    errors = capsys.readouterr().out.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") and "/nowhere/" in line for line in errors)


def test_experts_of_config_json_are_spread_without_a_model_block(task: Path, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    qwen3 = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32}
    model = _copy_model(task / "model", tmp_path / "m", **qwen3, **experts)
    for size, words in (
        (2, None),
        (3, r"num_experts \(4\) must be divisible by actor_config.expert_model_parallel_size \(3\)"),
    ):
        changes = [f"actor_config.expert_model_parallel_size={size}", f"rl_config.actor_resource.num_npus={size}"]
        changes += [*_name(model), "megatron_training.global_batch_size=24", "rl_config.mini_batch_size=24"]
        changes += ["actor_config.micro_batch_size=4"]
        cfg = load_run_config(str(task / "run.yaml"), None, changes)
        if words is None:
            assert resolve_run(cfg, 1).config.with_shape("actor_config").num_experts == 4
        else:
            with pytest.raises(ConfigError, match=words):
                resolve_run(cfg, 1)

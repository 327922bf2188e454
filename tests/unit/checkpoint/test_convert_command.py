"""The command line: upstream's commands, checks of the model type, failures that leave nothing, resuming, proof."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_rl.checkpoint.conversion_plan import Destination, make_plan
from mindspeed_rl.checkpoint.convert import run_plan
from mindspeed_rl.checkpoint.jobs import Target
from mindspeed_rl.checkpoint.options import Progress
from mindspeed_rl.checkpoint.source import ModelOptions, open_hf
from mindspeed_rl.cli.convert import main
from mindspeed_rl.models.layout import Layout


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5 folder with tokenizer and generation config, in several weight files."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("cli") / "qwen"
    model = tiny_models.save_hf_model("qwen2", folder, max_shard_size="300KB")
    words = {f"w{i}": i for i in range(128)}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.save_pretrained(folder)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.generation_config.save_pretrained(folder)
    return folder


def run(text: str, *more: object) -> int:
    return main([*shlex.split(text), *map(str, more)])


def error_of(capsys: pytest.CaptureFixture[str], text: str, *more: object) -> str:
    """The one line a failing command prints."""
    assert run(text, *more) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_the_guide_s_commands_run_unchanged_but_for_the_paths(tensor_parallel: int, qwen: Path, tmp_path: Path) -> None:
    command = f"""
       --use-mcore-models
       --model-type GPT
       --load-model-type hf
       --save-model-type mg
       --target-tensor-parallel-size {tensor_parallel}
       --target-pipeline-parallel-size 2
       --add-qkv-bias
       --load-dir {qwen}
       --save-dir {tmp_path}/qwen2.5_mcore/
       --tokenizer-model {qwen}/tokenizer.json
       --model-type-hf llama2
       --params-dtype bf16
    """
    assert run(command) == 0
    folders = sorted(path.name for path in (tmp_path / "qwen2.5_mcore/iter_0000001").glob("mp_*"))
    assert folders == [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(tensor_parallel) for pp in range(2)]
    state = torch.load(tmp_path / "qwen2.5_mcore/iter_0000001/mp_rank_00_000/model_optim_rng.pt", weights_only=False)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.bfloat16}
    assert "decoder.layers.0.self_attention.linear_qkv.bias" in state["model"]


def test_the_guide_s_layer_list_with_blanks_is_understood(qwen: Path, tmp_path: Path) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path} --target-pipeline-parallel-size 2 --num-layer-list 1, 3") == 0


def test_the_hf_result_is_complete_and_usable_by_transformers(qwen: Path, tmp_path: Path) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/mg --target-tensor-parallel-size 2") == 0
    back = f"--load-model-type mg --save-model-type hf --load-dir {tmp_path}/mg --save-dir {tmp_path}/hf --max-shard-size 250KB"
    assert run(back) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    original = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), original.state_dict().values()))
    assert model.generation_config.temperature == 0.5
    vocab = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").get_vocab()
    assert vocab["w127"] == 127 and vocab == transformers.AutoTokenizer.from_pretrained(qwen).get_vocab()
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    sizes = {name: (tmp_path / "hf" / name).stat().st_size for name in set(index["weight_map"].values())}
    assert len(sizes) > 1 and max(sizes.values()) < 260_000
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in model.state_dict().values())


def test_upstream_s_first_generation_writes_below_the_original_hf_folder(qwen: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(qwen, tmp_path / "hf")
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/mg") == 0
    assert run(f"--load-model-type mg --save-model-type hf --load-dir {tmp_path}/mg --save-dir {tmp_path}/hf") == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf/mg2hf").config.vocab_size == 128


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (
            "qwen2",
            "--model-type-hf mixtral",
            "mixtral is another family: the checkpoint is qwen2; use llama2 or qwen25 or qwen2",
        ),
        ("qwen2", "--model-type-hf baichuan", "baichuan is not supported: the checkpoint is qwen2"),
        ("qwen3", "--model-type-hf qwen3-moe", "the checkpoint is qwen3; use qwen3"),
        ("llama", "--add-qkv-bias", "this llama has no bias on query, key and value"),
        ("llama", "--post-norm", "llama has no norm behind attention and MLP"),
        ("llama", "--add-dense-bias", "no supported model has biases in its dense layers"),
        ("llama", "--target-tensor-parallel-size 3", "cannot be divided over 3 tensor parallel ranks"),
        ("llama", "--target-tensor-parallel-size 8", "4 groups of 16 rows .dimension 0. cannot be divided over 8"),
        ("llama", "--target-pipeline-parallel-size 3", "4 layers cannot be divided over pipeline size 3"),
        ("llama", "--target-pipeline-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "in chunks of 3"),
        ("llama", "--target-pipeline-parallel-size 2 --num-layer-list 1,2", "adds up to 3 layers; the model has 4"),
        ("llama", "--num-layer-list a,b", "expected layer numbers separated by commas"),
        ("llama", "--target-expert-parallel-size 2", "needs a model with experts"),
        ("qwen3-moe", "--save-to-legacy", "legacy layout cannot hold qwen3_moe"),
        ("llama", "--target-tensor-paralel-size 2", "did you mean --target-tensor-parallel-size"),
        ("llama", "--load-model-type optim", "optimizer state is not converted"),
        ("llama", "--noop-layers 0 --ckpt-format torch_dist", "hold no empty layers"),
        ("llama", "--lora-r 8", "--lora-r and --lora-alpha need an adapter"),
        ("llama", "--tokenizer-model /nowhere/tokenizer.json", "/nowhere/tokenizer.json does not exist"),
        ("llama", "--mtp-num-layers 1", "llama has no multi-token-prediction layers"),
    ],
)
def test_contradictions_are_one_clear_error_and_leave_nothing(
    name: str, flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    tiny_models.save_hf_model(name, tmp_path / "hf")
    text = error_of(capsys, f"--load-dir {tmp_path}/hf --save-dir {tmp_path}/out {flags}")
    assert re.search(message, text), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_form_of_the_source_is_seen(qwen: Path, tmp_path: Path, form: str) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/there --ckpt-format {form}") == 0
    assert run(f"--load-dir {tmp_path}/there --save-dir {tmp_path}/back --save-model-type hf --verify") == 0
    ours, theirs = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (tmp_path / "back", qwen)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_split_of_a_hugging_face_result_is_refused_and_the_source_s_own_is_said_to_have_no_effect(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/mg --target-pipeline-parallel-size 2 --num-layer-list 1,3") == 0
    back = f"--load-dir {tmp_path}/mg --save-dir {tmp_path}/back --save-model-type hf"
    for name in ("tensor", "pipeline", "expert"):
        text = error_of(capsys, f"{back} --target-{name}-parallel-size 2")
        assert f"--target-{name}-parallel-size 2: the result is a Hugging Face folder, which is not split" in text
        assert not (tmp_path / "back").exists()
    assert run(f"{back} --target-tensor-parallel-size 1 --num-layer-list 1,3 --moe-grouped-gemm") == 0
    said = capsys.readouterr().err
    assert "--num-layer-list has no effect" in said and "--moe-grouped-gemm has no effect" in said and "--target" not in said


def test_context_parallelism_is_said_to_change_nothing(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/out --context-parallel-size 4") == 0
    assert "context parallelism never changes a checkpoint" in capsys.readouterr().err


def test_bad_hf_folders_are_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fresh(name: str) -> Path:
        tiny_models.save_hf_model("qwen3", tmp_path / name, max_shard_size="200KB")
        return tmp_path / name

    def message(folder: Path) -> str:
        text = error_of(capsys, f"--load-dir {folder} --save-dir {tmp_path}/out")
        assert not (tmp_path / "out").exists()
        return text

    assert "does not exist" in message(tmp_path / "nothing")
    folder = fresh("missing")
    first = sorted(folder.glob("*.safetensors"))[0]
    first.unlink()
    assert f"lacks {first.name}, which model.safetensors.index.json names" in message(folder)
    folder = fresh("truncated")
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-5])
    assert "is truncated" in message(folder)
    folder = fresh("no-config")
    (folder / "config.json").unlink()
    assert "has no config.json" in message(folder)
    tiny_models.save_hf_model("qwen3", tmp_path / "one")
    tensors = load_file(tmp_path / "one/model.safetensors")
    wrong = {**tensors, "model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64)}
    save_file(wrong, tmp_path / "one/model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight has shape [95, 64]; config.json means [96, 64]" in message(tmp_path / "one")
    save_file({k: v for k, v in tensors.items() if "norm" not in k}, tmp_path / "one/model.safetensors")
    assert "has no tensor 'model.layers.0.input_layernorm.weight'" in message(tmp_path / "one")
    save_file({**tensors, "model.extra": torch.zeros(1)}, tmp_path / "one/model.safetensors")
    assert "holds 'model.extra' unknown to qwen3; --load-checkpoint-loosely skips" in message(tmp_path / "one")
    assert run(f"--load-dir {tmp_path}/one --save-dir {tmp_path}/out --load-checkpoint-loosely") == 0


def test_bad_megatron_folders_are_one_clear_error(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(folder: Path) -> str:
        text = error_of(capsys, f"--load-model-type mg --save-model-type hf --load-dir {folder} --save-dir {tmp_path}/out")
        assert not (tmp_path / "out").exists()
        return text

    split = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    for name in ("missing", "truncated", "wrong"):
        assert run(f"--load-dir {qwen} --save-dir {tmp_path}/{name} {split}") == 0
        (tmp_path / name / "iter_0000001" / "checksums.json").unlink()  # as other writers' files, which have none
    rank = "iter_0000001/mp_rank_01_001"
    (tmp_path / "missing" / rank / "model_optim_rng.pt").unlink()
    assert "model_optim_rng.pt is missing" in message(tmp_path / "missing")
    (tmp_path / "missing" / rank).rmdir()
    assert "lacks mp_rank_01_001 (a checkpoint of TP 2, PP 2, EP 1 has 4 ranks)" in message(tmp_path / "missing")
    file = tmp_path / "truncated" / rank / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "model_optim_rng.pt" in message(tmp_path / "truncated")
    file = tmp_path / "wrong" / rank / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(64, 47)
    torch.save(content, file)
    assert "decoder.layers.1.mlp.linear_fc2.weight has shape [64, 47]; expected [64, 48]" in message(tmp_path / "wrong")
    del content["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
    torch.save(content, file)
    assert "lacks 'decoder.layers.1.mlp.linear_fc2.weight'" in message(tmp_path / "wrong")
    assert "is not a Megatron checkpoint" in message(qwen)


def test_an_existing_result_is_not_lost_unless_asked(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--load-dir {qwen} --save-dir {tmp_path}/out"
    assert run(command) == 0
    assert "exists already" in error_of(capsys, command)
    assert run(f"{command} --overwrite --target-tensor-parallel-size 2") == 0
    assert len(list((tmp_path / "out/iter_0000001").glob("mp_*"))) == 2


def test_a_dry_run_prints_every_tensor_and_its_file_and_writes_nothing(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/out --target-tensor-parallel-size 2 --dry-run") == 0
    text = capsys.readouterr().out
    assert f"{tmp_path}/out/iter_0000001/mp_rank_01/model_optim_rng.pt" in text
    assert "model/decoder.layers.3.mlp.linear_fc1.weight  [96, 64] float32" in text
    assert "2 files" in text and "in memory at most" in text
    assert not (tmp_path / "out").exists()


def plan_for(qwen: Path, out: Path, **options: object):
    source = open_hf(qwen, ModelOptions())
    return make_plan(source, Destination("mcore", out, Layout(num_layers=4, tp=2, pp=2), **options))


class StopAfter(Progress):
    """Progress that is interrupted after some tasks, as by Ctrl-C, and notes where each run starts."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks
        self.started_at: list[int] = []

    def start(self, what: str, total_bytes: int, done_bytes: int) -> None:
        self.started_at.append(done_bytes)

    def advance(self, num_bytes: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_run_looks_unfinished_and_the_next_one_continues(qwen: Path, tmp_path: Path) -> None:
    whole = run_plan(plan_for(qwen, tmp_path / "whole"), task_bytes=20_000)
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_for(qwen, tmp_path / "parts"), task_bytes=20_000, progress=StopAfter(3))
    assert not (tmp_path / "parts/iter_0000001").exists()
    assert not (tmp_path / "parts/latest_checkpointed_iteration.txt").exists()
    second = StopAfter(-1)
    made = run_plan(plan_for(qwen, tmp_path / "parts"), task_bytes=20_000, progress=second, verify=True)
    assert second.started_at[0] > 40_000
    assert read_all(made) == read_all(whole)
    assert not list((tmp_path / "parts").glob("*.partial"))


@pytest.mark.parametrize("form", ["", "--ckpt-format torch_dist"])
def test_a_result_that_is_damaged_later_is_refused_by_file_name(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/made --target-tensor-parallel-size 2 {form}") == 0
    (folder,) = (tmp_path / "made").glob("iter_*")
    kept = {name for name in read_all(folder) if name != "checksums.json"}
    assert json.loads((folder / "checksums.json").read_text()).keys() == kept
    assert run(f"--load-dir {tmp_path}/made --save-dir {tmp_path}/sound --save-model-type hf") == 0
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    text = error_of(capsys, f"--load-dir {tmp_path}/made --save-dir {tmp_path}/out --save-model-type hf")
    assert f"{largest} is damaged: its checksum is" in text
    assert not (tmp_path / "out").exists()


def test_a_run_with_other_settings_starts_afresh(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_for(qwen, tmp_path / "out"), task_bytes=20_000, progress=StopAfter(3))
    second = StopAfter(-1)
    run_plan(plan_for(qwen, tmp_path / "out", dtype=torch.bfloat16), task_bytes=20_000, progress=second)
    assert second.started_at == [0]


def test_a_run_whose_adapter_has_changed_starts_afresh(qwen: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter/adapter_model.safetensors"
    adapter.parent.mkdir()
    second = StopAfter(-1)
    for content, progress in ((b"one", StopAfter(3)), (b"other", second)):
        adapter.write_bytes(content)
        plan = replace(plan_for(qwen, tmp_path / "out"), beside=(adapter.parent,))
        with contextlib.suppress(KeyboardInterrupt):
            run_plan(plan, task_bytes=20_000, progress=progress)
    assert second.started_at == [0]


def test_worker_processes_give_the_same_files(qwen: Path, tmp_path: Path) -> None:
    result = run_plan(plan_for(qwen, tmp_path / "one"), task_bytes=200_000)
    two = run_plan(plan_for(qwen, tmp_path / "two"), task_bytes=200_000, workers=2, verify=True)
    assert read_all(result) == read_all(two)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def pwrite(*arguments: object) -> int:
        calls.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    text = error_of(capsys, f"--load-dir {qwen} --save-dir {tmp_path}/out")
    assert "the disk of" in text and "is full" in text and calls
    assert not list((tmp_path / "out").glob("*"))


class Flipped:
    """A target that writes one wrong bit into one parameter."""

    def __init__(self, target: Target) -> None:
        self.target, self.name, self.hf, self.num_bytes = target, target.name, target.hf, target.num_bytes

    def write(self, tensors: Mapping[str, Tensor]) -> bool:
        damaged = {name: tensor.clone() for name, tensor in tensors.items()}
        damaged[self.hf[0]].view(-1).view(torch.int32)[5] ^= 1
        return self.target.write(damaged)


def test_verification_finds_a_single_wrong_bit_and_leaves_nothing(qwen: Path, tmp_path: Path) -> None:
    plan = plan_for(qwen, tmp_path / "out")

    def create() -> list[Target]:
        targets = list(plan.create())
        return [Flipped(t) if t.name == "decoder.layers.2.mlp.linear_fc2.weight" else t for t in targets]

    damaged = replace(plan, create=create)
    with pytest.raises(ValueError, match="model.layers.2.mlp.down_proj.weight differs from the source"):
        run_plan(damaged, verify=True)
    assert not list((tmp_path / "out").glob("iter*"))


def test_a_truncated_model_holds_the_first_layers(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--load-dir {qwen} --save-dir {tmp_path}/mg --num-layers 2 --verify") == 0
    assert "dropped 2 decoder layers beyond --num-layers 2" in capsys.readouterr().err
    assert run(f"--load-model-type mg --save-model-type hf --load-dir {tmp_path}/mg --save-dir {tmp_path}/hf") == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.num_hidden_layers == 2


def test_a_tied_config_with_a_different_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save_hf_model("qwen2-tied", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "hf/model.safetensors")
    assert run(f"--load-dir {tmp_path}/hf --save-dir {tmp_path}/fine") == 0
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / "hf/model.safetensors")
    text = error_of(capsys, f"--load-dir {tmp_path}/hf --save-dir {tmp_path}/out")
    assert "lm_head.weight differs from model.embed_tokens.weight" in text
    assert not list((tmp_path / "out").glob("iter*"))


MEASURE = """
import resource, sys
import torch
from mindspeed_rl.cli.convert import main
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
main(["--load-dir", sys.argv[1], "--save-dir", sys.argv[2] + "/warm", "--dry-run"])
before = peak()
assert main(["--load-dir", sys.argv[1], "--save-dir", sys.argv[2] + "/mg", "--target-tensor-parallel-size", "2"]) == 0
back = ["--load-model-type", "mg", "--save-model-type", "hf"]
assert main([*back, "--load-dir", sys.argv[2] + "/mg", "--save-dir", sys.argv[2] + "/hf"]) == 0
print("grown", peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    import subprocess
    import sys

    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    size = (tmp_path / "model/model.safetensors").stat().st_size
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "model", tmp_path], capture_output=True, text=True, check=True
    )
    grown = int(out.stdout.splitlines()[-1].split()[1])
    largest_parameter = 2 * 2816 * 1024 * 2
    assert size > 500_000_000 and grown < 6 * largest_parameter

"""A conversion that fails says one sentence and leaves nothing: strange values, full disks, folders in use, bad flags."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl.checkpoint.jobs import _describe_non_finite
from mindspeed_rl.checkpoint.tensor_record import is_finite
from mindspeed_rl.cli.convert import main


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model as an HF folder and as a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("sources")
    tiny_models.save_hf_model("qwen2", folder / "hf", dtype=torch.bfloat16)
    words = ["--load-dir", folder / "hf", "--save-dir", folder / "mg", "--target-tensor-parallel-size", 2]
    assert main([str(word) for word in words]) == 0
    return {"hf": folder / "hf", "mg": folder / "mg"}


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4097])
def test_a_single_strange_value_is_seen_wherever_it_stands(dtype: torch.dtype, size: int) -> None:
    plain = torch.randn(size).to(dtype)
    assert is_finite(plain) and is_finite(torch.full((size,), torch.finfo(dtype).max).to(dtype))
    values = [float("nan")] if dtype == torch.float8_e4m3fn else [float("nan"), float("inf"), -float("inf")]
    for place in {0, size // 2, size - 1}:
        for value in values:
            tensor = plain.float().clone()
            tensor[place] = value
            tensor = tensor.to(dtype)
            assert not is_finite(tensor)
            kind = "NaN" if value != value else "an infinity"
            assert _describe_non_finite(tensor) == f"1 elements that are not finite, the first {kind} at [{place}]"


def test_integers_and_empty_tensors_are_finite() -> None:
    assert is_finite(torch.arange(3)) and is_finite(torch.empty(0))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_strange_values_are_told_and_fail_the_verification_with_the_tensor_s_name(
    value: str, form: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sources["hf"], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = float(value)
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    words = ("--load-dir", tmp_path / "hf", "--ckpt-format", form, "--save-dir")
    assert main([str(word) for word in (*words, tmp_path / "mg")]) == 0
    told = "note: 1 tensors hold NaN or infinities, the first 'model.layers.2.mlp.up_proj.weight'"
    assert told in capsys.readouterr().err
    back = ("--load-dir", tmp_path / "mg", "--save-model-type", "hf", "--save-dir")
    assert main([str(word) for word in (*back, tmp_path / "back")]) == 0
    assert told in capsys.readouterr().err
    for direction in (words, back):
        capsys.readouterr()
        assert main([str(word) for word in (*direction, tmp_path / "new/out", "--verify")]) == 2
        said = capsys.readouterr().err
        kind = "NaN" if value == "nan" else "an infinity"
        what = f"1 elements that are not finite, the first {kind} at [5, 7]"
        assert f"error: verification: model.layers.2.mlp.up_proj.weight holds {what}" in said
        assert not (tmp_path / "new").exists()


def test_a_cast_never_makes_infinities(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(sources["hf"], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = -70000.0
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    text = error_of(capsys, "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out", "--params-dtype", "fp16")
    assert "model.layers.1.mlp.down_proj.weight holds 70144, beyond 65504, the largest torch.float16" in text
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- room

FORMS: dict[str, Callable[[dict[str, Path]], list[object]]] = {
    "torch": lambda sources: ["--load-dir", sources["hf"], "--target-tensor-parallel-size", 2],
    "torch_dist": lambda sources: ["--load-dir", sources["hf"], "--ckpt-format", "torch_dist"],
    "hf": lambda sources: ["--load-dir", sources["mg"], "--save-model-type", "hf"],
}


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size at the folder; skips the test where mounting is not allowed."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(not shutil.which("mount"), reason="there is no mount command")
@pytest.mark.parametrize("form", FORMS)
def test_a_disk_of_any_size_holds_the_whole_result_or_nothing_of_it(
    form: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(file.stat().st_size for file in sources["hf"].iterdir()) // 1024
    results = []
    for kilobytes in (4, 64, *range(size - 12, size + 160, 8)):
        with small_disk(disk, kilobytes):
            capsys.readouterr()
            status = main([str(word) for word in (*FORMS[form](sources), "--save-dir", disk / "above/out")])
            if status == 0:
                break
            (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
            assert status == 2 and str(disk / "above/out") in line and "needs 28" in line
            results.append("full" if "is full" in line else "left" if "left" in line else line)
            assert not list(disk.iterdir())
    assert status == 0 and set(results) == {"left", "full"}


LIMITED = """
import resource, sys
from mindspeed_rl.cli.convert import main
for words in sys.argv[1:]:
    for limit in (100, 20_000, 90_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        print(main(words.split()))
"""


def test_a_file_that_may_not_grow_is_one_clear_error_and_leaves_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    words = [" ".join(map(str, (*form(sources), "--save-dir", tmp_path / "above/out"))) for form in FORMS.values()]
    done = subprocess.run([sys.executable, "-c", LIMITED, *words], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stdout.split() == ["2"] * 9 and len(lines) == 9
    assert all(str(tmp_path / "above/out") in line and "the result needs 28" in line for line in lines), lines
    assert not (tmp_path / "above").exists()


def test_folders_that_were_there_stay(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    shutil.copytree(sources["hf"], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    assert main([str(word) for word in ("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out", "--verify")]) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


# ---------------------------------------------------------------------- folders


@pytest.mark.parametrize("form", ["hf", "mg"])
def test_nothing_is_written_into_what_is_read(
    form: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "above/source"
    shutil.copytree(sources[form], source)
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    kind = () if form == "hf" else ("--save-model-type", "hf")
    for place in (source, source / "inside", source / "in/side", tmp_path / "link", tmp_path / "link/in", source / "../source"):
        for more in ((), ("--overwrite",)):
            text = error_of(capsys, "--load-dir", source, "--save-dir", place, *kind, *more)
            assert f"--save-dir {place} lies in --load-dir {source}, which is read; choose another folder" in text
    text = error_of(capsys, "--load-dir", tmp_path / "link", "--save-dir", source, *kind, "--overwrite")
    assert "which is read" in text
    assert sorted(source.rglob("*")) == before


def test_a_result_does_not_replace_a_folder_that_holds_its_source(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sources["mg"], tmp_path / "above/mg")
    words = ("--load-dir", tmp_path / "above/mg", "--overwrite", "--save-dir", tmp_path / "above")
    assert "would replace --load-dir" in error_of(capsys, *words, "--save-model-type", "hf")
    iteration = tmp_path / "above/mg/iter_0000001"
    text = error_of(capsys, "--load-dir", iteration, "--save-dir", tmp_path / "above/mg", "--hf-cfg-dir", sources["hf"])
    assert "would replace --load-dir" in text
    assert (iteration / "mp_rank_00/model_optim_rng.pt").is_file()


def test_a_link_to_a_folder_and_a_file_in_the_way(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    words = ("--load-dir", sources["mg"], "--save-model-type", "hf", "--save-dir")
    assert main([str(word) for word in (*words, tmp_path / "link", "--verify")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real/model.safetensors").is_file()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        assert f"{place} cannot be made" in error_of(capsys, *words, place)


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("form", "flags", "message"),
    [
        ("mg", "--save-model-type hf --max-shard-size abc", "--max-shard-size abc: expected a number with KB, MB, GB"),
        ("mg", "--save-model-type hf --max-shard-size 0GB", "--max-shard-size 0GB: expected a number"),
        ("mg", "--save-model-type hf --max-shard-size=-1GB", "--max-shard-size -1GB: expected a number"),
        ("hf", "--max-shard-size 5GB", "--max-shard-size 5GB needs --save-model-type hf"),
        ("mg", "--load-iteration 5", r"mg has no iter_0000005 .iteration 5.; it has iter_0000001"),
        ("hf", "--load-iteration 5", "--load-iteration 5 needs a Megatron source; .* is read as an HF folder"),
        ("hf", "--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by is 0; it must be at least 1"),
        ("hf", "--target-tensor-parallel-size 1000000000", "cannot be divided over 1000000000 tensor parallel ranks"),
        ("hf", "--target-pipeline-parallel-size 1000000000", "4 layers cannot be divided over pipeline size 1000000000"),
        ("hf", "--target-tensor-parallel-size 0", "tp is 0; it must be at least 1"),
        ("hf", "--mtp-num-layers 1000000000", "qwen2 has no multi-token-prediction layers"),
        ("hf", "--num-layers 0", "--num-layers 0 must be between 1 and 4"),
        ("mg", "--mtp-num-layers 3", "--mtp-num-layers 3: .* has 0 such layers"),
    ],
)
def test_a_flag_that_cannot_be_is_one_sentence(
    form: str, flags: str, message: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    text = error_of(capsys, "--load-dir", sources[form], "--save-dir", tmp_path / "above/out", *flags.split())
    assert re.search(message, text), text
    assert not (tmp_path / "above").exists()


@pytest.mark.parametrize(
    "flag", ["--w-pack", "--mla-mm-split", "--add-dense-bias", "--add-output-layer-bias", "--embed-layernorm", "--qlora-nf4"]
)
def test_what_is_not_there_is_refused_with_the_place_that_says_why(
    flag: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = error_of(capsys, "--load-dir", sources["hf"], "--save-dir", tmp_path / "out", flag)
    assert "docs/checkpoint_conversion.md" in text
    for page in ("docs/checkpoint_conversion.md", "docs/zh/checkpoint_conversion.md"):
        section = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
        assert f"| `{flag}` |" in section


def test_optimizer_state_is_said_to_stay_behind(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--save-model-type", "hf", "--save-dir")
    told = "note: the optimizer state in"
    assert main([str(word) for word in ("--load-dir", sources["mg"], *words, tmp_path / "none")]) == 0
    assert told not in capsys.readouterr().err
    for form in ("inside", "beside"):
        shutil.copytree(sources["mg"], tmp_path / form)
        (tmp_path / form / "iter_0000001/checksums.json").unlink()  # as other writers' files, which have none
        rank = tmp_path / form / "iter_0000001/mp_rank_00"
        if form == "inside":
            content = torch.load(rank / "model_optim_rng.pt", weights_only=False)
            content["optimizer"] = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0]}]}
            torch.save(content, rank / "model_optim_rng.pt")
        else:
            torch.save({0: {}}, rank / "distrib_optim.pt")
        assert main([str(word) for word in ("--load-dir", tmp_path / form, *words, tmp_path / f"{form}-out")]) == 0
        assert f"{told} {tmp_path}/{form}/iter_0000001 is not converted" in capsys.readouterr().err
    text = error_of(capsys, "--load-dir", sources["mg"], "--load-model-type", "optim", "--save-dir", tmp_path / "out")
    assert "optimizer state is not converted" in text and "docs/checkpoint_conversion.md" in text


@pytest.mark.parametrize("content", ["[1]", "1", "null", '"x"', "{", "[" * 100_000, "{}"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_that_holds_something_else_is_one_sentence(
    name: str, content: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sources["hf"], tmp_path / "hf")
    (tmp_path / "hf" / name).write_text(content)
    text = error_of(capsys, "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out")
    assert name in text and not (tmp_path / "out").exists()


@pytest.mark.parametrize("header", [[1], {"a": 1}, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, {"a": {}}])
def test_a_damaged_safetensors_header_is_one_sentence(
    header: object, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sources["hf"], tmp_path / "hf")
    text = json.dumps(header).encode()
    (tmp_path / "hf/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "is not a safetensors file" in error_of(capsys, "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out")


@pytest.mark.parametrize("name", ["deepseek3", "deepseek2-lite"])
def test_mindspeed_s_packing_in_torch_dist_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.save_hf_model(name, tmp_path / "hf")
    words = ("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "out", "--mla-layout", "mindspeed")
    text = error_of(capsys, *words, "--ckpt-format", "torch_dist")
    assert "--mla-layout mindspeed with --ckpt-format torch_dist" in text and "use --ckpt-format torch" in text
    assert not (tmp_path / "out").exists()
    assert main([str(word) for word in (*words, "--verify")]) == 0
    back = ("--load-dir", tmp_path / "out", "--save-model-type", "hf", "--save-dir", tmp_path / "back", "--verify")
    assert main([str(word) for word in back]) == 0

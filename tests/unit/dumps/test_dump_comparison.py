"""Dumps are written, joined over ranks and compared, and the first difference is named."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import Tensor

from mindspeed_rl.cli import diff_dump
from mindspeed_rl.dumps.comparison import Dump, compare
from mindspeed_rl.dumps.record import RECORDS, Cut, Record, Statistics


def record(folder: Path, rank: int = 0, *, tp: int = 1, dp: int = 1, tensors: bool = True, limit: int = 1 << 20) -> Record:
    place = {"rank": rank, "tp": rank % tp, "dp": rank // tp, "cp": 0}
    return Record(folder, 0, "actor", "update", place, {"tp": tp, "dp": dp, "cp": 1}, tensors, limit)


def dump(folder: Path, named: dict[str, Tensor], **more: bool) -> Path:
    result = record(folder, **more)
    for order, (name, tensor) in enumerate(named.items()):
        result.add(name, order, tensor)
    result.write()
    return folder


def three(change: float = 0.0) -> dict[str, Tensor]:
    middle = torch.tensor([1.0, -4.0])
    middle[1] += change
    return {"z.embedding": torch.ones(2, 3), "a.layer": middle, "m.head": torch.tensor([0.5 + change])}


def test_the_first_difference_in_the_order_of_the_computation_is_named_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(dump(tmp_path / "a", three())), str(dump(tmp_path / "b", three(0.25)))]
    assert diff_dump.main(folders) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "first difference: step 0, actor update: a.layer (rank 0 against rank 0): largest difference 0.25 at [1] (-4 and "
        "-3.75), largest number 4 (float32, 0.0001 allowed)"
    )
    assert lines[1].startswith("then: step 0, actor update: m.head") and lines[2] == "2 of 3 tensors differ"


def test_equal_dumps_end_with_0_and_rounding_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(dump(tmp_path / "a", three())), str(dump(tmp_path / "b", three(1e-5)))]
    assert diff_dump.main(folders) == 0
    assert capsys.readouterr().out == "no difference: 3 tensors compared\n"
    assert diff_dump.main([*folders, "--tolerance", "1e-7"]) == 1


def test_the_coarser_type_of_the_two_says_what_rounding_explains(tmp_path: Path) -> None:
    exact = {"x": torch.tensor([1.0, 3.14159])}
    rounded = {"x": exact["x"].bfloat16()}
    findings = compare(Dump.open(dump(tmp_path / "a", exact)), Dump.open(dump(tmp_path / "b", rounded)))
    assert findings.compared == 1 and not findings.differences


def test_whole_numbers_must_be_equal_and_nan_equals_nan(tmp_path: Path) -> None:
    first = {"ids": torch.tensor([5, 6]), "x": torch.tensor([float("nan"), 1.0]), "y": torch.tensor([1.0])}
    second = {"ids": torch.tensor([5, 7]), "x": torch.tensor([float("nan"), 1.0]), "y": torch.tensor([float("inf")])}
    findings = compare(Dump.open(dump(tmp_path / "a", first)), Dump.open(dump(tmp_path / "b", second)))
    assert [difference.name for difference in findings.differences] == ["ids", "y"]


def test_statistics_alone_are_compared_too(tmp_path: Path) -> None:
    folders = [dump(tmp_path / "a", three(), tensors=False), dump(tmp_path / "b", three(0.25), tensors=False)]
    findings = compare(*map(Dump.open, folders))
    assert findings.by_statistics == 3 and findings.differences[0].name == "a.layer"
    assert findings.differences[0].what.startswith("by statistics, the norm is 4.12311 and 3.88104")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_tensors_are_kept_up_to_the_limit(tmp_path: Path) -> None:
    result = record(tmp_path, limit=16)
    for order, size in enumerate((3, 4, 1)):
        result.add(f"t{order}", order, torch.ones(size))
    folder = result.write()
    stored = [item["stored"] for item in json.loads((folder / "index.json").read_text())["tensors"]]
    assert stored == [True, False, True]


def test_parts_of_ranks_are_joined_before_they_are_compared(tmp_path: Path) -> None:
    """A gate and up projection over two ranks, a replicated norm, and an embedding whose padding is cut off."""
    gate_up, norm, embedding = torch.arange(32.0).reshape(8, 4), torch.ones(4), torch.arange(12.0).reshape(3, 4)
    whole = record(tmp_path / "whole")
    for order, (name, tensor) in enumerate({"gate_up": gate_up, "norm": norm, "embedding": embedding}.items()):
        whole.add(name, order, tensor, everywhere=True)
    whole.write()
    for rank in range(2):
        part = record(tmp_path / "cut", rank, tp=2)
        rows = [2 * rank, 2 * rank + 1]
        part.add("gate_up", 0, gate_up[rows + [4 + row for row in rows]], cut=Cut(0, rank, 2, blocks=(2, 2)), everywhere=True)
        part.add("norm", 1, norm, everywhere=True)
        part.add("embedding", 2, embedding[2 * rank : 2 * rank + 2], cut=Cut(0, rank, 2, size=3), everywhere=True)
        part.write()
    findings = compare(Dump.open(tmp_path / "whole"), Dump.open(tmp_path / "cut"))
    assert findings.compared == 3 and not findings.differences and not findings.notes


def test_a_missing_rank_and_other_rows_are_said_in_a_sentence(tmp_path: Path) -> None:
    part = record(tmp_path / "cut", 0, tp=2)
    part.add("x", 0, torch.ones(1), cut=Cut(0, 0, 2))
    part.write()
    whole = record(tmp_path / "whole")
    whole.add("x", 0, torch.ones(2))
    whole.write()
    findings = compare(Dump.open(tmp_path / "cut"), Dump.open(tmp_path / "whole"))
    assert findings.notes == ["x: only the parts of ranks 0 are in the first dump, 1 of 2"] and not findings.compared

    for rank in range(2):
        replica = record(tmp_path / "replicas", rank, dp=2)
        replica.add("x", 0, torch.ones(1))
        replica.add("gradient", 1, torch.ones(3), everywhere=True)
        replica.write()
    whole.add("gradient", 1, torch.ones(3), everywhere=True)
    whole.write()
    findings = compare(Dump.open(tmp_path / "replicas"), Dump.open(tmp_path / "whole"))
    assert findings.compared == 1 and "other rows (dp 2 against 1)" in findings.notes[0] and len(findings.notes) == 1


def test_a_folder_without_a_dump_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(dump(tmp_path / "a", three()))
    assert diff_dump.main([folder, str(tmp_path / "nothing")]) == 2
    assert "holds no dump" in capsys.readouterr().err
    index = next(Path(folder).rglob("index.json"))
    index.write_text('{"format": "another"}')
    assert diff_dump.main([folder, folder]) == 2
    assert str(index) in capsys.readouterr().err


def test_statistics_of_parts_merge_into_those_of_the_whole() -> None:
    values = torch.tensor([1.0, -2.0, float("nan"), 4.0, 5.0])
    whole = Statistics.compute(values)
    parts = Statistics.merge([Statistics.compute(values[:2]), Statistics.compute(values[2:])])
    assert (whole.size, whole.not_finite, whole.least, whole.most, whole.mean) == (5, 1, -2.0, 5.0, 2.0)
    assert whole.norm == pytest.approx(46**0.5) and parts.norm == pytest.approx(46**0.5)
    assert (parts.size, parts.not_finite, parts.least, parts.most, parts.mean) == (5, 1, -2.0, 5.0, 2.0)


NUMBER = {"type": ["number", "boolean", "null"]}
TENSOR = {
    "type": "object",
    "properties": {
        "type": {"const": "torch.Tensor"},
        "dtype": {"pattern": r"^torch\.\w+$"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        **dict.fromkeys(("Max", "Min", "Mean", "Norm"), NUMBER),
        "requires_grad": {"type": "boolean"},
        "data_name": {"pattern": r"^Module\..*\.pt$"},
    },
    "required": ["type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"],
    "additionalProperties": False,
}


def calls(direction: str, fields: dict[str, object]) -> dict[str, object]:
    return {rf"^Module(\.[\w@]+)+\.[A-Za-z]\w*\.{direction}\.\d+$": fields}


def members(**fields: object) -> dict[str, object]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


LIST, EMPTY = {"type": "array", "items": TENSOR}, {"type": "object", "maxProperties": 0}
#: what mindstudio-probe 26.2 wrote at level L0 for a model of two blocks, with as well as without tensors
DUMP_JSON = members(
    task={"enum": ["tensor", "statistics"]},
    level={"const": "L0"},
    framework={"const": "pytorch"},
    dump_data_dir={"type": ["string", "null"]},
    data={
        "type": "object",
        "patternProperties": {
            **calls("forward", members(input_args=LIST, input_kwargs=EMPTY, output=LIST, parameters={"type": "object"})),
            **calls("backward", members(input=LIST, output=LIST)),
            **calls("parameters_grad", {"type": "object", "additionalProperties": {**LIST, "minItems": 1}}),
        },
        "additionalProperties": False,
    },
)


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_the_form_of_msprobe_has_its_folders_names_and_statistics(tmp_path: Path, task: str) -> None:
    """Names and files as msprobe's comparison pairs them; numbers against torch."""
    result = RECORDS["msprobe"](tmp_path, 3, "actor", "update", {"rank": 1}, {"rank": 2}, task == "tensor", 1 << 20)
    attention, layer = torch.tensor([[1.0, -4.0]], requires_grad=True), torch.tensor([[2.0, 0.5]], dtype=torch.bfloat16)
    for micro in range(2):
        result.add(f"update_0.micro_{micro}.layers.7.attention", 1, attention + micro, kind="SelfAttention")
        result.add(f"update_0.micro_{micro}.layers.7.output", 2, layer, kind="TransformerLayer")
        result.add(f"update_0.micro_{micro}.loss_inputs.mask", 3, torch.tensor([True, False]))
    # the backward pass of the first micro-batch ends last
    result.add("update_0.micro_1.layers.7.attention", 1, torch.full((1, 2), 2.0), kind="SelfAttention", is_gradient=True)
    result.add("update_0.micro_0.layers.7.attention", 1, torch.full((1, 2), 3.0), kind="SelfAttention", is_gradient=True)
    result.add("update_0.gradients.model.layers.7.self_attn.q_proj.weight", 4, torch.eye(2))
    folder = result.write()
    assert folder == tmp_path / "actor_update" / "step3" / "rank1"
    written = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("dump", "stack", "construct")}
    jsonschema.validate(written["dump"], DUMP_JSON)
    data, first = written["dump"]["data"], "Module.decoder.layers.7"
    assert list(data)[:3] == [
        f"{first}.self_attention.SelfAttention.forward.0",
        f"{first}.TransformerLayer.forward.0",
        "Module.loss_inputs.mask.Tensor.forward.0",
    ]
    (output,) = data[f"{first}.self_attention.SelfAttention.forward.1"]["output"]
    assert [output[key] for key in ("Max", "Min", "Mean", "Norm")] == [2.0, -3.0, -0.5, pytest.approx(13**0.5)]
    assert output["requires_grad"] and output["shape"] == [1, 2] and output["dtype"] == "torch.float32"
    assert [data[f"{first}.self_attention.SelfAttention.backward.{index}"]["input"][0]["Max"] for index in (0, 1)] == [3.0, 2.0]
    mask = data["Module.loss_inputs.mask.Tensor.forward.0"]["output"][0]
    assert [mask[key] for key in ("Max", "Min", "Mean", "Norm")] == [True, False, None, None]
    weight = data["Module.model.layers.7.self_attn.q_proj.Weight.parameters_grad.0"]["weight"][0]
    assert weight["Norm"] == pytest.approx(2**0.5)
    parents = written["construct"]
    assert parents[f"{first}.self_attention.SelfAttention.forward.1"] == f"{first}.TransformerLayer.forward.1"
    assert parents[f"{first}.TransformerLayer.forward.1"] is None and len(parents) == 8
    stacks = dict((call, lines) for names, lines in written["stack"].values() for call in names)
    assert len(stacks) == 6 and all("test_dump_comparison.py" in lines[0] for lines in stacks.values())
    if task == "statistics":
        assert written["dump"]["dump_data_dir"] is None and not (folder / "dump_tensor_data").exists()
        return
    assert torch.equal(torch.load(folder / "dump_tensor_data" / output["data_name"]), attention + 1)
    assert len(list((folder / "dump_tensor_data").iterdir())) == 9

"""The supervised stages: the registry holds what the run file may name, and each entry is a whole stage."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mindspeed_rl import registry
from mindspeed_rl.config import SUPERVISED_STAGES, MegatronConfig
from mindspeed_rl.workers.stages import STAGES
from mindspeed_rl.workers.stages.stage import Stage
from mindspeed_rl.workers.supervised_worker import _make_stage

ECHO = """
from mindspeed_rl.workers.stages.instruction import Instruction

class Echo(Instruction):
    unit = "echoes"
"""


def test_the_registry_holds_the_stages_that_a_run_file_may_name() -> None:
    assert set(STAGES) == set(SUPERVISED_STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_the_interface(name: str) -> None:
    kind = registry.load(STAGES[name], f"stage {name}")
    assert issubclass(kind, Stage) and not inspect.isabstract(kind) and kind.__doc__


def test_a_stage_is_one_class_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_stage.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(STAGES, "sft", "echo_stage:Echo")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    stage = _make_stage(MegatronConfig(stage="sft"), tokenizer)
    assert stage.unit == "echoes" and type(stage) is sys.modules["echo_stage"].Echo

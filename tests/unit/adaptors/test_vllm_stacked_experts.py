"""vLLM's loader of gpt-oss takes the experts of a layer together."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import torch

from mindspeed_rl.adaptors.vllm_stacked_experts import find_stack, join_parts


def test_the_loader_knows_no_expert_by_itself_under_the_names_of_a_weight_sync() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("model_executor").joinpath("models/gpt_oss.py").read_text())
    # the ends of the names of single experts that it takes
    known = next(
        set(ast.literal_eval(node.value))
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD"
    )
    kinds = [(part, kind) for part in ("gate", "up", "down") for kind in ("weight", "bias")]
    sent = [f"model.layers.0.mlp.experts.0.{part}_proj.{kind}" for part, kind in kinds]
    assert all(find_stack(name) and name.rpartition(".")[2] not in known for name in sent)


def test_gate_and_up_alternate_in_the_columns_of_a_stack() -> None:
    gate, up = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2) + 10
    joined = join_parts({"up": up, "gate": gate})
    assert joined.tolist() == [[0, 10, 2, 12, 4, 14], [1, 11, 3, 13, 5, 15]]
    assert join_parts({"gate": gate[:, 0], "up": up[:, 0]}).tolist() == [0, 10, 2, 12, 4, 14]

"""What an engine's loader does with a tensor is read from the engine, whatever it does; the layouts we state agree with it."""

from __future__ import annotations

import pytest
import torch
from engine_model import EngineModel, EngineRank
from test_resharding_plan import CONFIGS, ops_of
from torch import nn

from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.layouts import InferenceLayout

SHAPES = {
    "q": (8, 6),
    "k": (4, 6),
    "norm": (6,),
    "bias": (8,),
    "score": (1, 6),
    "odd": (160, 6),
    "head": (20000, 6),
    "wide": (2, 20000),
}


class Fused(nn.Module):
    """A loader of every kind: cut rows and columns, transposed, padded, repeated, and one that deals out rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = {
            "qk": (6, 6),
            "norm": (6,),
            "bias": (4,),
            "score": (6, 1),
            "odd": (160, 6),
            "head": (10050, 6),
            "wide": (2, 10000),
        }
        self.added = 0
        self.held = nn.ParameterDict({name: nn.Parameter(torch.ones(size).to(dtype)) for name, size in sizes.items()})

    def load_weights(self, weights: object) -> None:
        for name, tensor in weights:  # pyrefly: ignore[not-iterable]  (what an engine is given)
            held = {key: parameter.data for key, parameter in self.held.items()}
            if name == "q":
                held["qk"][:4].copy_(tensor[4:])
            elif name == "k":
                held["qk"][4:].copy_(tensor[1:3])
            elif name == "bias":
                held["bias"].copy_(tensor[4:])
            elif name == "score":
                held["score"].copy_(tensor.t())
            elif name == "odd":
                held["odd"].copy_(tensor[[*range(0, 160, 2), *range(1, 160, 2)]] + self.added)
            elif name == "head":
                held["head"][:10000].copy_(tensor[10000:])
            elif name == "wide":
                held["wide"].copy_(tensor[:, 10000:])
            else:
                held[name].copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_boxes_are_read_and_a_loader_that_deals_out_rows_keeps_its_tensors(dtype: torch.dtype) -> None:
    model = Fused(dtype)
    result = read_destinations(model, model.load_weights, SHAPES, torch.bfloat16)
    assert {(entry.tensor, entry.tensor_slice) for entry in result.entries} == {
        ("q", ((4, 8), (0, 6))), ("k", ((1, 3), (0, 6))), ("norm", ((0, 6),)), ("bias", ((4, 8),)), ("score", ((0, 1), (0, 6))),
        ("head", ((10000, 20000), (0, 6))), ("wide", ((0, 2), (10000, 20000))),
    }  # fmt: skip
    assert set(result.loaded) == {"held.odd"}
    assert set(result.dtypes.values()) == {dtype}, "tensors travel as what the engine stores"


def test_an_engine_that_computes_its_weights_is_refused() -> None:
    model = Fused(torch.float32)
    model.added = 1
    with pytest.raises(RuntimeError, match=r"1 parameters .* hold nothing as it was loaded, for example held\.odd"):
        read_destinations(model, model.load_weights, SHAPES, torch.float32)


def test_an_entry_is_a_view_of_the_elements_that_the_loader_writes() -> None:
    model = Fused(torch.float32)
    result = read_destinations(model, model.load_weights, SHAPES, torch.float32)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    model.load_weights(tensors.items())
    parameters = dict(model.named_parameters())
    for entry in result.entries:
        held = entry.view(parameters[entry.parameter].data)
        assert torch.equal(held, tensors[entry.tensor][tuple(slice(*side) for side in entry.tensor_slice)])
        assert held.untyped_storage().data_ptr() == parameters[entry.parameter].untyped_storage().data_ptr()


@pytest.mark.parametrize("transposed", [False, True])
def test_what_a_sync_writes_is_exactly_what_need_not_be_kept_until_then(transposed: bool) -> None:
    model = Fused(torch.float32)
    result = read_destinations(model, model.load_weights, SHAPES, torch.float32)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    model.load_weights(tensors.items())
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    if transposed:  # a kernel's layout, in which the proof reads it
        parameters["held.odd"] = parameters["held.odd"].t().contiguous().t()
    expected = {name: value.clone() for name, value in parameters.items()}
    replaced = list(result.list_replaced(parameters))
    for view in replaced:
        view.fill_(float("nan"))
    lost = {name: int(value.isnan().sum()) for name, value in parameters.items()}
    # rows of padding follow the head's 10000, and a part of the columns is not in one piece
    assert lost == {name: value.numel() for name, value in parameters.items()} | {"held.head": 10000 * 6}
    model.load_weights(tensors.items())
    if transposed:
        parameters["held.odd"].copy_(dict(model.named_parameters())["held.odd"])
    assert all(torch.equal(value, expected[name]) for name, value in parameters.items())


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(("tp", "expert_ranks"), [(1, 1), (2, 1), (4, 1), (2, 4)])
def test_the_stated_layout_is_what_an_engine_reads_out(name: str, tp: int, expert_ranks: int) -> None:
    experts = name not in ("tied", "few heads")
    if expert_ranks > 1 and not experts:
        pytest.skip("a dense model")
    ops = ops_of(name)
    shapes = {hf: shape for op in ops for hf, shape in zip(op.hf, op.shapes)}
    kv_heads = {"few heads": 2, "latent": 8}.get(name, 4)
    count = 8 if experts else 0
    sharing = max(1, expert_ranks // tp)
    stated = InferenceLayout(tp, sharing, expert_ranks > 1, sharing).list_slices(ops, num_experts=count)
    for rank in range(max(tp, expert_ranks)):
        at = EngineRank(tp, rank % tp, 8, kv_heads, count, expert_ranks, rank % expert_ranks)
        engine = EngineModel(shapes, at)
        result = read_destinations(engine, engine.load_weights, shapes, torch.float32)
        assert set(result.needs()) == {
            (hf, tensor_slice) for hf, slices in stated.items() for tensor_slice, ranks in slices.items() if rank in ranks
        }

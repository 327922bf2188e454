"""What the suite does around vllm-ascend: keys per release, environment rules, layouts of expert weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import json
import random
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_rl.adaptors import vllm_ascend, vllm_ascend_experts
from mindspeed_rl.adaptors.vllm_ascend_sleep import subtract_ranges
from mindspeed_rl.cli.doctor import stack
from mindspeed_rl.config import GenerateConfig

EXPERTS, INNER, HIDDEN = 3, 4, 8
RANK, HEADS, NOPE, VALUE = 4, 2, 3, 5


class AscendExperts(nn.Module):
    """A layer of experts as vllm-ascend leaves it after loading: last two dimensions swapped, no loader on the tensors."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 2 * inner), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(EXPERTS, inner, HIDDEN), requires_grad=False)

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor, expert: int) -> None:
        parameter.data[expert].copy_(loaded)


@dataclasses.dataclass(frozen=True)
class Routing:
    expert_map: torch.Tensor | None
    log2phy: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class DispatchInput:
    routing: Routing


class Dispatcher:
    def token_dispatch(self, token_dispatch_input: DispatchInput) -> torch.Tensor:
        assert token_dispatch_input.routing.expert_map is not None
        return token_dispatch_input.routing.expert_map


class Proposer:
    """What makes drafts by prediction layers, each with a head of its own; vllm-ascend compares its bits with the policy's."""

    def __init__(self, method: str) -> None:
        self.method, self.joined = method, 0
        layer = nn.Module()
        layer.shared_head = nn.ModuleDict({"norm": nn.Linear(HIDDEN, HIDDEN)})
        layer.shared_head.head = nn.Linear(HIDDEN, 3)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), layer])})

    def _maybe_share_lm_head(self, model: object) -> None:
        self.joined += 1


class LatentKernel:
    """Latent attention's kernel object: copies of the two halves of kv_b_proj per head, made when weights were loaded."""

    def __init__(self, kv_b_proj: nn.Linear) -> None:
        self.kv_b_proj = kv_b_proj
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        nope, value = self.kv_b_proj.weight.data.T.reshape(RANK, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
        if not hasattr(self, "W_UV"):
            self.W_UV, self.W_UK_T = torch.empty(HEADS, RANK, VALUE), torch.empty(HEADS, NOPE, RANK)
        self.W_UV.copy_(value.transpose(0, 1))
        self.W_UK_T.copy_(nope.permute(1, 2, 0))


class LatentAttention(nn.Module):
    """A layer of latent attention as vllm-ascend has it: the kernel object is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.impl = LatentKernel(self.kv_b_proj)


class Engine:
    """The calls of LLM that the hooks use; wake_up swaps expert dimensions by shape, as the workers of 0.18 and 0.23 do.

    As vLLM's executors do, it ignores a wake_up of what does not sleep.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.slept, self.awake = model, [], []
        self.sleeping: set[str] = set()

    def apply_model(self, function: Callable[[nn.Module], object]) -> list[object]:
        return [function(self.model)]

    def sleep(self, level: int) -> None:
        self.slept.append(level)
        self.sleeping = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        if not self.sleeping.issuperset(tags):
            return
        self.sleeping -= set(tags)
        self.awake += tags
        if "weights" not in tags:
            return
        for module in self.model.modules():
            for name, dimension in (("w13_weight", 1), ("w2_weight", 2)):
                parameter = getattr(module, name, None)
                if parameter is not None and parameter.shape[dimension] == HIDDEN:
                    setattr(module, name, nn.Parameter(parameter.transpose(1, 2), requires_grad=False))


def push(
    hooks: vllm_ascend.VllmAscendHooks, layer: AscendExperts, inner: int, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads numbered checkpoint tensors between the steps of the hooks."""
    hooks.before_load(layer)
    loaded = fill(layer, inner, offset)
    hooks.after_load(layer)
    return loaded


def fill(layer: AscendExperts, inner: int, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads numbered checkpoint tensors through each parameter's own loader, as vLLM models do."""
    w13 = torch.arange(EXPERTS * 2 * inner * HIDDEN, dtype=torch.float32).view(EXPERTS, 2 * inner, HIDDEN) + offset
    w2 = torch.arange(EXPERTS * HIDDEN * inner, dtype=torch.float32).view(EXPERTS, HIDDEN, inner) - offset
    for expert in range(EXPERTS):
        layer.w13_weight.weight_loader(layer.w13_weight, w13[expert], expert)
        layer.w2_weight.weight_loader(layer.w2_weight, w2[expert], expert)
    return w13, w2


def assert_kernels_see(layer: AscendExperts, w13: torch.Tensor, w2: torch.Tensor) -> None:
    assert layer.w13_weight.is_contiguous() and layer.w2_weight.is_contiguous()
    assert torch.equal(layer.w13_weight, w13.transpose(1, 2)) and torch.equal(layer.w2_weight, w2.transpose(1, 2))


# the second size is where shapes cannot tell the layouts apart: hidden == 2 * inner
@pytest.mark.parametrize("inner", [3, HIDDEN // 2, HIDDEN])
def test_expert_weights_reach_the_kernels_layout_after_every_push(inner: int) -> None:
    layer = AscendExperts(inner)
    hooks, engine = vllm_ascend.VllmAscendHooks(), Engine(layer)
    storage = layer.w13_weight.untyped_storage().data_ptr()
    hooks.restore_weights(engine)  # the first push comes to an engine that never slept
    assert_kernels_see(layer, *push(hooks, layer, inner, 0.5))
    hooks.restore_cache(engine)
    for iteration in range(3):
        hooks.release(engine)
        hooks.restore_weights(engine)
        loaded = push(hooks, layer, inner, float(iteration))
        assert_kernels_see(layer, *loaded)
        # the proof of a weight push reads the matrices as they were loaded
        for name, expected in zip(("w13_weight", "w2_weight"), loaded):
            unpack = hooks.unpack(layer)[f".{name}"]
            assert all(torch.equal(unpack(plane), values) for plane, values in zip(getattr(layer, name), expected))
        hooks.restore_cache(engine)
    assert layer.w13_weight.untyped_storage().data_ptr() == storage, "the memory pool's own tensors must be written"
    assert engine.slept == [1, 1, 1] and engine.awake == ["weights", "kv_cache"] * 3


class WithDrafts(nn.Module):
    """A model next to the prediction layers that make its drafts, which `wake_up` does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.draft = AscendExperts(INNER), AscendExperts(INNER)


@pytest.mark.parametrize("transposes", [True, False], ids=["wake_up transposes", "wake_up leaves the layout"])
def test_experts_of_a_draft_are_laid_out_for_themselves(transposes: bool) -> None:
    both, hooks = WithDrafts(), vllm_ascend.VllmAscendHooks()
    engine = Engine(both.target if transposes else nn.Linear(1, 1))
    for offset in range(4):
        hooks.before_load(both)
        loaded = [fill(layer, INNER, sign * offset) for layer, sign in ((both.target, 1.0), (both.draft, -1.0))]
        hooks.after_load(both)
        for layer, tensors in zip((both.target, both.draft), loaded):
            assert_kernels_see(layer, *tensors)
        assert len(hooks.unpack(both)) == 4
        hooks.restore_cache(engine)
        hooks.release(engine)
        hooks.restore_weights(engine)


def test_latent_attention_multiplies_with_the_pushed_weights() -> None:
    layer, hooks = LatentAttention(), vllm_ascend.VllmAscendHooks()
    storage = layer.impl.W_UV.data_ptr()
    pushed = torch.arange(layer.kv_b_proj.weight.numel(), dtype=torch.float32).view_as(layer.kv_b_proj.weight)
    hooks.before_load(layer)
    layer.kv_b_proj.weight.data.copy_(pushed)
    hooks.after_load(layer)
    for head in range(HEADS):
        rows = pushed[head * (NOPE + VALUE) : (head + 1) * (NOPE + VALUE)]
        assert torch.equal(layer.impl.W_UK_T[head], rows[:NOPE]) and torch.equal(layer.impl.W_UV[head], rows[NOPE:].T)
    assert layer.impl.W_UV.data_ptr() == storage, "captured graphs hold the address"


def test_a_push_without_sleep_works_too() -> None:
    layer, hooks = AscendExperts(3), vllm_ascend.VllmAscendHooks()
    for offset in (1.0, 2.0):
        assert_kernels_see(layer, *push(hooks, layer, 3, offset))


def test_experts_that_were_woken_but_not_pushed_stop_the_run() -> None:
    layer, hooks = AscendExperts(3), vllm_ascend.VllmAscendHooks()
    engine = Engine(layer)
    hooks.release(engine)
    hooks.restore_weights(engine)
    with pytest.raises(RuntimeError, match="push weights first"):
        hooks.restore_cache(engine)
    with pytest.raises(RuntimeError, match="without a weight push"):
        hooks.release(engine)


def test_a_dense_model_may_wake_up_without_a_push() -> None:
    hooks, engine = vllm_ascend.VllmAscendHooks(), Engine(nn.Linear(2, 2))
    hooks.release(engine)
    hooks.restore_weights(engine)
    hooks.restore_cache(engine)
    hooks.release(engine)
    assert engine.slept == [1, 1]


def test_additional_config_has_only_keys_of_the_release() -> None:
    assert additional((0, 18)) == additional((0, 22)) == {"refresh": True}
    assert additional((0, 23)) == additional((0, 26))
    off = {"enable_mlapo": False}
    assert additional((0, 23)) == off | {"refresh": True, "weight_nz_mode": 0, "enable_sleep_mode_extra_cleanup": True}
    # unknown keys are errors there, and `enabled` sets the other two
    enabled = {"rl_config": {"enabled": True, "sleep_mode_extra_cleanup": True}}
    assert additional((0, 27)) == additional((0, 30)) == off | enabled
    with pytest.raises(ValueError, match="0.11 is older than 0.18"):
        additional((0, 11))


@pytest.mark.parametrize(("key", "eager", "cleans"), [
    (None, True, True),
    (None, False, False),  # else each wake-up captures all graphs again
    (True, False, True),
    (False, True, False),
])  # fmt: skip
def test_a_sleeping_engine_frees_more_unless_it_has_graphs(key: bool | None, eager: bool, cleans: bool) -> None:
    keys = {"enforce_eager": eager, "sleep_mode_extra_cleanup": key}
    assert additional((0, 23), **keys)["enable_sleep_mode_extra_cleanup"] is cleans
    assert additional((0, 28), **keys)["rl_config"]["sleep_mode_extra_cleanup"] is cleans


def test_extra_cleanup_that_a_release_does_not_have_is_refused() -> None:
    assert additional((0, 18), sleep_mode_extra_cleanup=False) == {"refresh": True}
    with pytest.raises(ValueError, match=r"sleep_mode_extra_cleanup \(true\) is not available in vllm-ascend 0\.18"):
        additional((0, 18), sleep_mode_extra_cleanup=True)


def additional(release: tuple[int, int], **keys: Any) -> dict[str, Any]:
    """The settings of vllm-ascend for these keys in a release."""
    return vllm_ascend.VllmAscendHooks(release).engine_arguments(GenerateConfig(**keys))["additional_config"]


def expert_map(path: Path, *layers: list[list[int]]) -> Path:
    """The file of an expert load balancer: the experts of each device of each layer."""
    results = [
        {
            "layer_id": number,
            "device_count": len(devices),
            "device_list": [{"device_id": i, "device_expert": experts} for i, experts in enumerate(devices)],
        }
        for number, devices in enumerate(layers)
    ]
    path.write_text(json.dumps({"moe_layer_count": len(layers), "layer_list": results}))
    return path


@pytest.mark.parametrize("tensor_size", [1, 4])
def test_an_engine_of_any_size_is_built_on_the_die_of_its_rank(tensor_size: int) -> None:
    arguments = vllm_ascend.VllmAscendHooks((0, 18)).engine_arguments(GenerateConfig(infer_tensor_parallel_size=tensor_size))
    assert arguments["distributed_executor_backend"] == "external_launcher"  # "uni" would build on die 0


def test_an_expert_map_reaches_the_engine(tmp_path: Path) -> None:
    path = str(expert_map(tmp_path / "map.json", [[0, 2], [1, 3]], [[3, 1], [2, 0]]))
    hooks = vllm_ascend.VllmAscendHooks((0, 23))
    assert "eplb_config" not in hooks.engine_arguments(GenerateConfig())["additional_config"]
    additional = hooks.engine_arguments(GenerateConfig(expert_map_path=path))["additional_config"]
    assert additional["eplb_config"] == {"expert_map_path": path}


def test_settings_of_vllm_ascend_come_beside_those_that_weight_updates_need() -> None:
    config = GenerateConfig(additional_config={"enable_cpu_binding": True})
    additional = vllm_ascend.VllmAscendHooks((0, 23)).engine_arguments(config)["additional_config"]
    own = vllm_ascend.VllmAscendHooks((0, 23)).engine_arguments(GenerateConfig())["additional_config"]
    assert additional == {"enable_cpu_binding": True, **own}


def test_an_expert_map_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = expert_map(tmp_path / "twice.json", [[0, 2], [1, 3]], [[0, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match="places expert 2 of layer 1 on two devices"):
        vllm_ascend.VllmAscendHooks((0, 23)).engine_arguments(GenerateConfig(expert_map_path=str(path)))


def test_a_release_is_read_from_a_version() -> None:
    assert vllm_ascend._parse_release("0.23.0rc1") == (0, 23)
    with pytest.raises(ValueError, match="'main' is not a vllm-ascend version"):
        vllm_ascend._parse_release("main")


def test_a_release_that_nobody_looked_at_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_ascend.importlib.metadata, "version", lambda name: "0.20.2rc1")
    with pytest.warns(UserWarning, match=r"vllm-ascend 0\.20 was not looked at \(.*0\.23"):
        assert vllm_ascend._installed_release() == (0, 20)


@pytest.mark.parametrize("version", ["0.23.0.post1", "0.26.0rc1", "0.30.0rc2"])
def test_releases_that_were_read_are_taken_without_a_word(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_ascend.importlib.metadata, "version", lambda name: version)
    assert vllm_ascend._installed_release() == vllm_ascend._parse_release(version)
    assert stack.examine_stack({"vllm-ascend": version}).members[0].state != "refused"


def test_expert_weights_in_a_layout_of_another_release_stop_the_run() -> None:
    layer = AscendExperts(INNER)
    hooks = vllm_ascend.VllmAscendHooks()
    hooks.before_load(layer)
    for name, parameter in list(layer.named_parameters()):  # a loader that lays them out anew
        layer.register_parameter(name, nn.Parameter(parameter.data.contiguous(), requires_grad=False))
    with pytest.raises(RuntimeError, match="w13_weight was not a view of the kernels' layout"):
        hooks.after_load(layer)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "VLLM_ASCEND_ENABLE_NZ: 1"),
        ({"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_ASCEND_ENABLE_FUSED_MC2": "1"}, "VLLM_ASCEND_ENABLE_FUSED_MC2"),
        ({"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_ASCEND_ENABLE_MLAPO": "1"}, r"ENABLE_MLAPO \(1 when unset\) copies weights"),
    ],
)
def test_an_environment_that_breaks_weight_updates_is_refused(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        vllm_ascend.check_environment(environment)


def test_expandable_segments_are_refused_where_an_engine_is_built_and_left_to_its_own_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ValueError, match="PYTORCH_NPU_ALLOC_CONF: .* cannot be combined with the rollout engine's sleep mode"):
        vllm_ascend.VllmAscendHooks((0, 23)).engine_arguments(GenerateConfig())
    vllm_ascend.apply()  # the process of a server's engine, where vllm-ascend has set it


class AdaptedLayer:
    def __init__(self, ranks: int, *, is_divided: bool) -> None:
        self.tp_size, self.lora_config = ranks, types.SimpleNamespace(fully_sharded_loras=is_divided)

    def apply(self, x: str, bias: None = None) -> str:
        return "own"


def _mcp_apply(x: str, bias: None, layer: AdaptedLayer) -> str:
    return "gathered"


class MergedAdaptedLayer(AdaptedLayer):
    """As in vLLM 0.23, where this form of layer always gathers."""

    def apply(self, x: str, bias: None = None) -> str:
        return _mcp_apply(x, bias, self)


def test_what_is_patched_before_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    placeholder = types.ModuleType("flash_attn")
    placeholder.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)  # what MindSpeed leaves
    monkeypatch.setitem(sys.modules, "flash_attn", placeholder)
    rotary = types.ModuleType("vllm.model_executor.layers.rotary_embedding.common")
    monkeypatch.setitem(sys.modules, rotary.__name__, rotary)
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.rotary_embedding"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    sampler = types.ModuleType("vllm_ascend.sample.sampler")
    sampler.random_sample = lambda probs, generators: probs.argmax(-1)  # type: ignore[attr-defined]
    for name in ("vllm_ascend", "vllm_ascend.sample"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, sampler.__name__, sampler)
    operators: Any = types.ModuleType("vllm._custom_ops")
    operators.apply_repetition_penalties, operators.apply_repetition_penalties_torch = "of CUDA", "of torch"
    monkeypatch.setitem(sys.modules, operators.__name__, operators)
    drafts = types.ModuleType("vllm_ascend.spec_decode.llm_base_proposer")
    drafts.AscendSpecDecodeBaseProposer = Proposer  # type: ignore[attr-defined]
    for name in ("vllm_ascend.spec_decode", drafts.__name__):
        monkeypatch.setitem(sys.modules, name, drafts)
    exchange = types.ModuleType("vllm_ascend.ops.fused_moe.token_dispatcher")
    exchange.TokenDispatcherWithAllGather = Dispatcher  # type: ignore[attr-defined]
    for name in ("vllm_ascend.ops", "vllm_ascend.ops.fused_moe", exchange.__name__):
        monkeypatch.setitem(sys.modules, name, exchange)
    columns = types.ModuleType("vllm.lora.layers.column_parallel_linear")
    columns.BaseLinearLayerWithLoRA = AdaptedLayer  # type: ignore[attr-defined]
    columns.MergedColumnParallelLinearWithLoRA = MergedAdaptedLayer  # type: ignore[attr-defined]
    for name in ("vllm.lora", "vllm.lora.layers", columns.__name__):
        monkeypatch.setitem(sys.modules, name, columns)
    int8 = types.ModuleType("vllm_ascend.quantization.methods.w8a8_dynamic")
    int8.ACL_FORMAT_FRACTAL_NZ = 29  # type: ignore[attr-defined]
    # as from 0.27 on, where routers are classes and the module chooses no experts
    int8.AscendW8A8DynamicFusedMoEMethod = type("Scheme", (), {"apply": None})  # type: ignore[attr-defined]
    for name in ("vllm_ascend.quantization", "vllm_ascend.quantization.methods", int8.__name__):
        monkeypatch.setitem(sys.modules, name, int8)
    hooks = vllm_ascend.VllmAscendHooks((0, 23))
    hooks.patch_libraries()
    hooks.patch_libraries()  # of another engine in the process
    assert int8.ACL_FORMAT_FRACTAL_NZ == 2  # the number of ND
    proposer, policy = Proposer("mtp"), types.SimpleNamespace(lm_head=nn.Linear(HIDDEN, 3))
    proposer._maybe_share_lm_head(policy)
    assert proposer.model["layers"][1].shared_head.head is policy.lm_head and proposer.joined == 1
    proposer = Proposer("eagle")
    proposer._maybe_share_lm_head(policy)
    assert proposer.model["layers"][1].shared_head.head is not policy.lm_head and proposer.joined == 1
    assert rotary.find_spec("flash_attn") is None
    assert operators.apply_repetition_penalties == "of torch"
    # several ranks that all have the inner columns of an adapter do not gather them; those that divide them do
    forms = [(ranks, divided) for ranks in (1, 2) for divided in (False, True)]
    applied = [MergedAdaptedLayer(ranks, is_divided=divided).apply("x") for ranks, divided in forms]
    assert applied == ["gathered", "gathered", "own", "gathered"]
    # experts 0 and 2 are on the first device, 1 and 3 on the second; each finds its own at their places
    places = torch.tensor([0, 2, 1, 3])
    for experts, expected in (([0, -1, 1, -1], [0, 1, -1, -1]), ([-1, 0, -1, 1], [-1, -1, 0, 1])):
        for _ in range(2):
            step = DispatchInput(Routing(torch.tensor(experts), places.clone()))
            assert Dispatcher().token_dispatch(step).tolist() == expected
    unmapped = DispatchInput(Routing(torch.tensor([0, -1]), None))
    assert Dispatcher().token_dispatch(unmapped).tolist() == [0, -1]
    assert rotary.find_spec("json") is not None and rotary.find_spec("no_such_package") is None


REPORTS = {"enable_return_routed_experts": True}


@pytest.mark.parametrize(
    ("quantization", "release", "arguments", "words"),
    [
        ("int8", (0, 23), REPORTS, ""),
        ("int8", (0, 27), {}, ""),
        ("int8", (0, 27), REPORTS, "report what they chose with vllm-ascend 0.23 to 0.26 only, and this is 0.27"),
        ("int8", (0, 18), REPORTS, "and this is 0.18; set router_replay.mode: R2"),
        (None, (0, 30), REPORTS, ""),
        ("w4a8", (0, 26), {}, ""),
        ("w4a8", (0, 27), {}, "(w4a8) needs vllm-ascend 0.23 to 0.26, and this is 0.27"),
    ],
)
def test_a_release_without_what_a_format_needs_is_refused(
    quantization: str | None, release: tuple[int, int], arguments: dict[str, Any], words: str
) -> None:
    config = GenerateConfig(infer_tensor_parallel_size=1, max_num_seqs=1, quantization=quantization)
    refused = pytest.raises(ValueError, match=re.escape(words)) if words else contextlib.nullcontext()
    with refused:
        vllm_ascend.VllmAscendHooks(release).check_arguments(config, arguments)


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_no_sync_writes_is_all_that_is_left_of_the_blocks(seed: int) -> None:
    generator = random.Random(seed)
    blocks = [(start, start + generator.randint(1, 90)) for start in range(100, 1000, 100)]
    starts = [generator.randrange(1100) for _ in range(30)]
    taken = [(start, start + generator.randint(0, 40)) for start in starts]
    left = list(subtract_ranges(blocks, taken))
    kept = {address for start, stop in left for address in range(start, stop)}
    lost = {address for start, stop in taken for address in range(start, stop)}
    assert kept == {address for start, stop in blocks for address in range(start, stop)} - lost
    assert sum(stop - start for start, stop in left) == len(kept) and all(start < stop for start, stop in left)


@pytest.mark.parametrize(("total", "ranks"), [(8, 2), (7, 2), (2, 2), (9, 4), (4, 4)])
def test_shares_of_tokens_become_all_tokens_in_their_order(total: int, ranks: int) -> None:
    tokens = torch.arange(2 * total).view(total, 2)
    shares = torch.tensor_split(tokens, ranks)  # as vllm-ascend divides them
    most = max(map(len, shares))
    gathered = torch.cat([nn.functional.pad(share, (0, 0, 0, most - len(share)), value=-1) for share in shares])
    assert torch.equal(vllm_ascend_experts.join_shares(gathered, total, ranks), tokens)

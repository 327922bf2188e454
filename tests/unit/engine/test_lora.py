"""Low-rank adapters: the numbers of the merged model and of `peft`, a base that never changes, checkpoints of both kinds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.lora import MergedSource, open_peft
from mindspeed_rl.checkpoint.model_source import find_model
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.checkpoint import CheckpointSaver, has_base_weights, load_checkpoint
from mindspeed_rl.engine.lora import MegatronAdapters, adapters_disabled, save_peft
from mindspeed_rl.engine.lora_layers import AdaptedModule, LoraSettings
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import list_local_weights, load_weights
from mindspeed_rl.models import find_architecture
from mindspeed_rl.models.plan import RoleModel, plan_model, read_model
from mindspeed_rl.models.weights import MemorySource, TensorSource
from mindspeed_rl.resharding.adapters import AdapterFolder
from mindspeed_rl.resharding.bit_sums import bit_sum
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError, compute_chunk_sums
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.workers.roles import PassSettings, Role

pytestmark = pytest.mark.usefixtures("training_world")

ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}
ROWS = Rows([torch.arange(2, 9), torch.arange(11, 22), torch.arange(30, 36), torch.arange(1, 13)], [3, 2, 1, 4])
EACH = MicroBatching(2)
WEIGHTS = "adapter_model.safetensors"


def save_model(folder: Path, name: str, **sizes: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("dense"), "Qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("moe"), "Qwen3Moe", **MOE)


def hf_weights(folder: Path) -> MemorySource:
    return MemorySource(load_file(folder / "model.safetensors"))


def make_engine(folder: Path, *, weights: TensorSource | None = None, started: bool = True, **keys: Any) -> TrainEngine:
    """An engine in training; the weights of `folder` unless others are given."""
    settings = {
        "bf16": False,
        "lr": 1e-2,
        "train_iters": 10,
        "lr_decay_style": "constant",
        "lora_target_modules": ALL,
        "lora_r": 4,
        "lora_alpha": 8,
    }
    config = MegatronConfig(**{**settings, **keys})
    parallel._seed_all(1)
    model = build_model(config, plan_model(config, folder), trainable=True)
    load_weights(model, hf_weights(folder) if weights is None else weights)
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
    if started:
        engine.start_training(1)
    return engine


def fill_adapters(engine: TrainEngine) -> None:
    """Adapters that have an effect, as after training."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in engine.model.models[0].named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def log_probs(engine: TrainEngine) -> Tensor:
    return torch.cat(engine.forward(ROWS, EACH)[0])


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


def adapters_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.models[0].named_parameters() if ".lora_" in name}


def base_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.models[0].named_parameters() if ".lora_" not in name}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


# ---------------------------------------------------------------- one model, seen in three ways


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_fresh_adapters_change_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    assert torch.equal(log_probs(make_engine(folder)), log_probs(make_engine(folder, lora_target_modules=None)))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_disabled_adapters_give_the_base_model_bit_for_bit(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    engine = make_engine(folder)
    fill_adapters(engine)
    adapted = log_probs(engine)
    with adapters_disabled(engine.model):
        base = log_probs(engine)
    assert torch.equal(base, log_probs(make_engine(folder, lora_target_modules=None)))
    assert (adapted - base).abs().max() > 0.01
    assert torch.equal(log_probs(engine), adapted)


@pytest.mark.parametrize(
    ("kind", "grouped"), [("dense", False), ("moe", False), ("moe", True)], ids=["dense", "moe", "grouped"]
)
def test_adapters_equal_the_merged_model(kind: str, grouped: bool, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    engine = make_engine(folder, moe_grouped_gemm=grouped)
    fill_adapters(engine)
    merged = MemorySource(dict(WeightStream(engine.model).named_tensors()))
    plain = make_engine(folder, weights=merged, lora_target_modules=None)
    torch.testing.assert_close(log_probs(engine), log_probs(plain), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_peft_folder_starts_a_model_merged_or_trained_on(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    targets = ["q_proj", "v_proj", "o_proj"] + (["gate_proj", "down_proj"] if kind == "dense" else [])
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, use_rslora=kind == "moe"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = make_engine(folder, weights=HfFolder(tmp_path / "merged"), lora_target_modules=None)

    keys = {"bf16": False, "load": str(tmp_path / "adapter"), "base_model": str(folder), "lr": 1e-2, "train_iters": 4}
    merged, trained = MegatronConfig(**keys), MegatronConfig(**keys, lora_target_modules=ALL, lora_r=5, lora_alpha=7)
    for config in (merged, trained):
        source = find_model(config, "actor_config")
        assert (source.weights, source.adapter) == (folder, tmp_path / "adapter")
        role = Role(
            "actor", RoleModel(config, source, plan_model(config, folder)), PassSettings(True, 0, 1.0), steps_per_iteration=1
        )
        torch.testing.assert_close(log_probs(role.engine), log_probs(expected), atol=2e-5, rtol=0)
    with adapters_disabled(role.model):
        torch.testing.assert_close(
            log_probs(role.engine), log_probs(make_engine(folder, lora_target_modules=None)), atol=1e-5, rtol=0
        )


def test_a_merged_source_reads_slices_of_the_merged_weights(dense: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    a, b = torch.randn(3, SIZES["intermediate_size"]), torch.randn(SIZES["hidden_size"], 3)
    save_file({f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    _, model_config, _ = read_model(dense)
    base = hf_weights(dense)
    source = MergedSource(base, open_peft(tmp_path, find_architecture("qwen2").weight_ops(model_config)))
    full = base.read(f"{name}.weight") + 2 * b @ a
    torch.testing.assert_close(source.read(f"{name}.weight"), full)
    torch.testing.assert_close(source.read(f"{name}.weight", 1, 8, 20), full[:, 8:20])
    torch.testing.assert_close(source.read(f"{name}.weight", 0, 4, 9), full[4:9])


def test_merging_is_w_plus_scale_times_b_a(dense: Path) -> None:
    engine = make_engine(dense)
    fill_adapters(engine)
    layer = engine.model.models[0].decoder.layers[1].mlp.linear_fc2
    expected = layer.weight.double() + 8 / 4 * layer.lora_b.double() @ layer.lora_a.double()
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    value = next(weight for weight in list_local_weights(engine.model) if weight.op.mcore == name).value()
    torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=0)


def test_a_push_sees_merged_weights_and_leaves_the_base_as_it_was(dense: Path) -> None:
    engine = make_engine(dense, bf16=True)
    fill_adapters(engine)
    before = base_of(engine)
    stream = WeightStream(engine.model)
    pushed = dict(stream.named_tensors(torch.bfloat16))
    plan, dtypes = stream.plan_full_tensors(torch.bfloat16)
    chunk_sums = compute_chunk_sums(plan, stream.sources, dtypes, Exchange.from_world(), torch.device("cpu")).wait()
    sums = {plan.tensors[chunk.tensor].name: value for chunk, value in zip(plan.chunks, chunk_sums)}  # one process, one chunk
    assert_same(base_of(engine), before)
    name = "model.layers.0.mlp.down_proj.weight"
    base = before["decoder.layers.0.mlp.linear_fc2.weight"]
    assert not torch.equal(pushed[name], base)
    assert {key: bit_sum(pushed[key]) for key in sums} == sums


# ---------------------------------------------------------------- training


def test_training_moves_the_adapters_and_nothing_else(moe: Path) -> None:
    engine = make_engine(moe)
    base, adapters = base_of(engine), adapters_of(engine)
    for _ in range(2):
        engine.train_step(ROWS, EACH, negative_log_prob)
    assert_same(base_of(engine), base)
    moved = [name for name, tensor in adapters_of(engine).items() if not torch.equal(tensor, adapters[name])]
    assert moved == list(adapters)
    optimized = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    assert optimized == sum(tensor.numel() for tensor in adapters.values())


def peft_twin(folder: Path, engine: TrainEngine) -> nn.Module:
    """`peft` on the HF model, with our A matrices; modules that Megatron fuses share one A there."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    twin = peft.get_peft_model(hf, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, bias="none", target_modules=modules))
    for layer, ours in zip(hf.model.layers, engine.model.models[0].decoder.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for group, source in (
            ((attention.q_proj, attention.k_proj, attention.v_proj), ours.self_attention.linear_qkv),
            ((attention.o_proj,), ours.self_attention.linear_proj),
            ((mlp.gate_proj, mlp.up_proj), ours.mlp.linear_fc1),
            ((mlp.down_proj,), ours.mlp.linear_fc2),
        ):
            shared = group[0].lora_A["default"].weight
            shared.data.copy_(source.lora_a)
            for module in group[1:]:
                module.lora_A["default"].weight = shared
    return twin


def hf_log_probs(model: nn.Module) -> Tensor:
    rows = []
    for ids, prompt in zip(ROWS.input_ids, ROWS.prompt_lengths):
        logits = model(input_ids=ids[None]).logits[0].float()
        rows.append(logits[prompt - 1 : -1].log_softmax(-1).gather(1, ids[prompt:, None])[:, 0])
    return torch.cat(rows)


def test_training_follows_peft_on_the_hf_model(dense: Path) -> None:
    engine = make_engine(dense, weight_decay=0.1, clip_grad=0.5)
    twin = peft_twin(dense, engine)
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    ours, theirs, norms = [], [], []
    for _ in range(8):
        ours.append(-log_probs(engine).mean())
        norms.append(engine.train_step(ROWS, EACH, negative_log_prob).grad_norm)
        loss = -hf_log_probs(twin).mean()
        theirs.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        assert norms[-1] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-5, rtol=1e-5)
    assert theirs[-1] < theirs[0] - 0.2
    torch.testing.assert_close(log_probs(engine), hf_log_probs(twin).detach(), atol=1e-5, rtol=0)


def test_recomputation_does_not_change_the_step(dense: Path) -> None:
    results = []
    for keys in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ):
        engine = make_engine(dense, **keys)
        engine.train_step(ROWS, EACH, negative_log_prob)
        results.append(adapters_of(engine))
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-7, rtol=1e-5)


def test_dropout_acts_in_training_only(dense: Path) -> None:
    engine = make_engine(dense, lora_dropout=0.5)
    fill_adapters(engine)
    assert torch.equal(log_probs(engine), log_probs(engine))
    layer = engine.model.models[0].decoder.layers[0].mlp.linear_fc1
    x = torch.randn(5, 1, 32)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    with adapters_disabled(engine.model):
        assert torch.equal(layer(x)[0], layer(x)[0])


def test_grouped_experts_train_as_experts_one_by_one(moe: Path) -> None:
    finals = []
    for grouped in (False, True):
        engine = make_engine(moe, moe_grouped_gemm=grouped)
        for _ in range(3):
            engine.train_step(ROWS, EACH, negative_log_prob)
        finals.append(dict(WeightStream(engine.model).named_tensors()))
    for name, tensor in finals[0].items():
        # Adam divides by the gradient's own size: one near zero may be rounded to another by another kernel
        torch.testing.assert_close(finals[1][name], tensor, atol=1e-5, rtol=1e-5)


def test_a_value_head_trains_with_the_adapters(dense: Path) -> None:
    config = MegatronConfig(
        bf16=False, lr=1e-2, train_iters=3, lr_decay_style="constant", lora_target_modules=["linear_fc2"], lora_r=2
    )
    plan = plan_model(config, dense, head="reward")
    model = build_model(config, plan, trainable=True).models[0]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {f"decoder.layers.{n}.mlp.linear_fc2.lora_{x}.default.weight" for n in range(2) for x in "AB"}
    assert trained == layers | {"rm_head.weight"}


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("only_adapters", [False, True])
@pytest.mark.parametrize("keys", [{}, {"bf16": True, "use_distributed_optimizer": True}], ids=["fp32", "bf16-distributed"])
def test_a_resumed_run_goes_on_bit_for_bit(dense: Path, tmp_path: Path, only_adapters: bool, keys: dict) -> None:
    keys = {**keys, "lora_ckpt_filter": only_adapters}
    engine = make_engine(dense, **keys)
    engine.train_step(ROWS, EACH, negative_log_prob)
    CheckpointSaver(engine, tmp_path).save(1, {})
    engine.train_step(ROWS, EACH, negative_log_prob)
    assert has_base_weights(tmp_path) is not only_adapters
    # with the base in the checkpoint, whatever the model held before does not matter
    weights = hf_weights(dense)
    if not only_adapters:
        weights = MemorySource({name: torch.zeros_like(tensor) for name, tensor in weights.tensors.items()})
    resumed = make_engine(dense, weights=weights, **keys)
    load_checkpoint(resumed, tmp_path)
    resumed.train_step(ROWS, EACH, negative_log_prob)
    assert_same(adapters_of(resumed), adapters_of(engine))
    assert_same(base_of(resumed), base_of(engine))


def test_a_checkpoint_of_adapters_alone_is_small(dense: Path, tmp_path: Path) -> None:
    sizes = []
    for number, only in enumerate((False, True)):
        engine = make_engine(dense, lora_ckpt_filter=only, no_save_optim=True)
        CheckpointSaver(engine, tmp_path / str(number)).save(1, {})
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(number)).rglob("*.distcp")))
    assert sizes[1] < 0.7 * sizes[0]


def test_adapters_start_from_a_checkpoint_that_has_none(dense: Path, tmp_path: Path) -> None:
    plain = make_engine(dense, lora_target_modules=None)
    plain.train_step(ROWS, EACH, negative_log_prob)
    CheckpointSaver(plain, tmp_path).save(1, {})
    engine = make_engine(dense, finetune=True)
    fresh = adapters_of(engine)
    load_checkpoint(engine, tmp_path)
    assert_same(adapters_of(engine), fresh)
    assert torch.equal(log_probs(engine), log_probs(plain))
    with pytest.raises(ValueError, match="without LoRA adapters; set finetune"):
        load_checkpoint(make_engine(dense), tmp_path)


def test_other_adapters_than_the_checkpoints_are_refused(dense: Path, tmp_path: Path) -> None:
    CheckpointSaver(make_engine(dense), tmp_path).save(1, {})
    for keys in ({"lora_alpha": 16}, {"lora_r": 2}, {"lora_target_modules": ["linear_fc2"]}, {"lora_target_modules": None}):
        with pytest.raises(ValueError, match="was trained with LoRA .lora_r 4, lora_alpha 8"):
            load_checkpoint(make_engine(dense, **keys), tmp_path)


def test_grouped_and_single_experts_read_each_others_adapters(moe: Path, tmp_path: Path) -> None:
    engine = make_engine(moe, moe_grouped_gemm=True)
    fill_adapters(engine)
    CheckpointSaver(engine, tmp_path).save(1, {})
    other = make_engine(moe, no_load_optim=True)
    load_checkpoint(other, tmp_path)
    torch.testing.assert_close(log_probs(other), log_probs(engine), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "grouped"), [("dense", False), ("moe", True)], ids=["dense", "grouped"])
def test_peft_loads_the_exported_adapters(kind: str, grouped: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    # transformers holds experts in one tensor, so that peft can only take the adapters outside them
    targets = ALL if kind == "dense" else ["linear_qkv", "linear_proj"]
    engine = make_engine(folder, moe_grouped_gemm=grouped, lora_target_modules=targets, started=False)
    fill_adapters(engine)
    save_peft(engine.model, LoraSettings.from_config(engine.config), tmp_path / "adapter", str(folder))
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter")
    expected = hf_log_probs(model).detach()
    if grouped:  # the grouped base runs in bfloat16 only; compare through its merged weights
        merged = MemorySource(dict(WeightStream(engine.model).named_tensors()))
        engine = make_engine(folder, weights=merged, lora_target_modules=None)
    torch.testing.assert_close(log_probs(engine), expected, atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_a_folder_for_the_rollout_engine_is_proven_against_the_adapters_that_train(dense: Path) -> None:
    engine = make_engine(dense, started=False)
    fill_adapters(engine)
    folder = AdapterFolder(MegatronAdapters(engine.model, LoraSettings.from_config(engine.config)), str(dense))
    folder.write()
    first, tensors = folder.path, dict(folder.tensors)
    hf = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(hf, first)
    torch.testing.assert_close(log_probs(engine), hf_log_probs(model).detach(), atol=1e-5, rtol=0)
    assert folder.num_bytes == sum(path.stat().st_size for path in first.iterdir())
    # what lies in the folder is not what is trained any more
    next(p for name, p in engine.model.models[0].named_parameters() if "lora_B" in name).data[0, 0] += 1e-3
    with pytest.raises(WeightDeliveryError, match="differ from those trained in 1 layers, for example model.layers.0"):
        folder._check(Exchange.from_world(), torch.device("cpu"))
    folder.write()
    assert not first.exists() and set(folder.tensors) == set(tensors)
    folder.tensors.popitem()
    with pytest.raises(WeightDeliveryError, match="differ from those trained"):
        folder._check(Exchange.from_world(), torch.device("cpu"))


# ---------------------------------------------------------------- mistakes


def test_a_target_that_cannot_be_adapted_is_named(dense: Path) -> None:
    with pytest.raises(ValueError, match="lora_target_modules: 'q_proj' is none of linear_qkv"):
        make_engine(dense, lora_target_modules=["q_proj"])


def test_a_layer_that_the_model_lacks_is_named(dense: Path) -> None:
    model_config = copy.copy(plan_model(MegatronConfig(), dense).model_config)
    object.__setattr__(model_config, "multi_latent_attention", True)
    with pytest.raises(ValueError, match="linear_qkv does not exist with multi_latent_attention"):
        LoraSettings(4, 8, 0.0, ("linear_qkv",)).check(model_config)


def test_every_adapted_module_can_be_switched(moe: Path) -> None:
    engine = make_engine(moe, started=False)
    count: Callable[[bool], int] = lambda state: sum(  # noqa: E731
        module.adapter_enabled is state for module in engine.model.models[0].modules() if isinstance(module, AdaptedModule)
    )
    assert (count(True), count(False)) == (2 * (2 + 2 * 4), 0)
    with pytest.raises(RuntimeError), adapters_disabled(engine.model):
        assert count(True) == 0
        raise RuntimeError
    assert count(False) == 0

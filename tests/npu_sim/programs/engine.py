"""The training engine on the simulated NPU or on the CPU: a tiny model, some optimizer steps, everything else on request.

Modes: "cpu" (gloo, the CPU adaptor), "npu" (HCCL, fused attention, no MindSpeed), "mindspeed" (as on hardware, where
tools/npu_smoke.sh runs this file without the simulator).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import multiprocessing
import os
import sys
import zlib
from pathlib import Path

from ranks import rank_settings, report

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu",
    "use_sliding_window": False,
}  # fmt: skip
#: rows of a few tokens lie behind the 8 for which the angles were trained
QWEN2_YARN = QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}}
QWEN3_MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False, "router_aux_loss_coef": 0.0, "num_hidden_layers": 2,
}  # fmt: skip

DEEPSEEK3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu",
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
#: the widths that the rollout's kernels of latent attention are built for
DEEPSEEK3_LATENT = DEEPSEEK3 | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
#: scales of int4 experts are those of 256 elements
_GROUPS = {"hidden_size": 256, "moe_intermediate_size": 512}
DEEPSEEK3_GROUPS = DEEPSEEK3_LATENT | _GROUPS
#: without experts, whose choice a rounding can change
DEEPSEEK3_DENSE = DEEPSEEK3_LATENT | {"first_k_dense_replace": 2}
#: one prediction layer each
DEEPSEEK3_PREDICTING = DEEPSEEK3 | {"num_nextn_predict_layers": 1}
#: indexers that choose fewer tokens than rows have; of the second the layers share one
_INDEXERS = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 5}
DEEPSEEK32 = DEEPSEEK3 | _INDEXERS | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
GLM5 = DEEPSEEK3 | _INDEXERS | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "n_group": 1,
    "indexer_types": ["full", "shared", "full", "shared"],
}  # fmt: skip
QWEN35_PREDICTING = QWEN2 | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 2, "head_dim": 32,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
    "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    "attention_bias": False, "mtp_num_hidden_layers": 1,
}  # fmt: skip
#: blocks of attention's cache have the bytes of a state, on two ranks too: 128 tokens x 32 numbers are 4 x 32 x 32
_HYBRID = QWEN2 | {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "attention_bias": False,
    "partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "mtp_num_hidden_layers": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
QWEN3_NEXT = _HYBRID | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "router_aux_loss_coef": 0.0,
}  # fmt: skip
#: three axes as in published configs, of which texts move along all alike
QWEN35 = _HYBRID | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "rope_parameters": {
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default", "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN35_MOE = {key: value for key, value in QWEN35.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "router_aux_loss_coef": 0.0,
}  # fmt: skip
_SHARED_BLOCKS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_SHARED_GROUPS = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}


def _add_tower(text: dict[str, object], name: str, **sizes: int) -> dict[str, object]:
    """A Qwen3.5 as it is published: its tower, whatever it is used for, and a prediction layer."""
    text = {**text, "mtp_num_hidden_layers": 1, **sizes}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": str(text["model_type"]).removesuffix("_text"),
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14},
            **{"num_position_embeddings": 64, "out_hidden_size": text["hidden_size"]},
        },
        **{"vision_start_token_id": 122, "vision_end_token_id": 123, "image_token_id": 120, "video_token_id": 121},
        "tie_word_embeddings": False,
    }


MODELS = {
    "qwen3_5_vl": _add_tower(QWEN35, "Qwen3_5"),
    "qwen3_5_moe_vl": _add_tower(QWEN35_MOE, "Qwen3_5Moe"),
    "qwen3_5_moe_vl_blocks": _add_tower(QWEN35_MOE, "Qwen3_5Moe", **_SHARED_BLOCKS),
    "qwen3_5_moe_vl_groups": _add_tower(QWEN35_MOE, "Qwen3_5Moe", **_SHARED_GROUPS),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35_MOE,
    "qwen2": QWEN2,
    "qwen2_yarn": QWEN2_YARN,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_16": QWEN3_MOE | {"num_experts": 16},
    # a 950's scales of MXFP8 experts come in pairs: of 64 columns
    "qwen3_moe_blocks": QWEN3_MOE | {"moe_intermediate_size": 64},
    # the same on each of two ranks
    "qwen3_moe_wide_blocks": QWEN3_MOE | {"moe_intermediate_size": 128},
    "qwen3_moe_groups": QWEN3_MOE | _GROUPS,
    "qwen3_next_blocks": QWEN3_NEXT | _SHARED_BLOCKS,
    "qwen3_5_moe_blocks": QWEN35_MOE | _SHARED_BLOCKS,
    "qwen3_next_groups": QWEN3_NEXT | _SHARED_GROUPS,
    "qwen3_5_moe_groups": QWEN35_MOE | _SHARED_GROUPS,
    "deepseek3": DEEPSEEK3,
    "deepseek3_latent": DEEPSEEK3_LATENT,
    "deepseek3_blocks": DEEPSEEK3_LATENT | {"moe_intermediate_size": 128, "v_head_dim": 16},
    "deepseek3_groups": DEEPSEEK3_GROUPS,
    "deepseek3_dense": DEEPSEEK3_DENSE,
    "deepseek3_predicting": DEEPSEEK3_PREDICTING,
    "deepseek32": DEEPSEEK32,
    "glm5": GLM5,
    "qwen3_5_predicting": QWEN35_PREDICTING,
}


def main() -> None:
    """Everything: Megatron's checkpoint writer starts processes that import this file again."""
    settings = rank_settings()
    mode, layout = settings["mode"], settings.get("layout", {})
    simulated = mode != "cpu" and "NPU_SIM_DEVICES" in os.environ
    if simulated:
        import simulator

        simulator.install()
        if settings.get("adamw_of_the_host"):
            from simulator.fused import round_adamw_as_the_host

            round_adamw_as_the_host()
    if "MINDSPEED_SRC" in os.environ:
        sys.path.insert(0, os.environ["MINDSPEED_SRC"])

    import torch
    from copies import Copies

    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.config import MegatronConfig

    platform.select("cpu" if mode == "cpu" else "npu")
    keys = {
        "lr": 2e-3,
        "min_lr": 2e-3,
        "lr_decay_style": "constant",
        "train_iters": 100,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": settings.get("bf16", False),
        "use_distributed_optimizer": True,
        "loss_chunk_size": 16,
        "micro_batch_size": 2,
        "num_attention_heads": 4,
    }
    config = MegatronConfig(**keys | layout)
    if mode == "npu":
        import without_mindspeed

        without_mindspeed.install()
    else:
        adaptors.apply("train")
        if mode == "mindspeed" and simulated:
            import mindspeed_operators

            mindspeed_operators.install()
        adaptors.configure(config)
    if not settings.get("fused_attention", True):
        adaptors._KERNELS.pop(("npu", "fused_attention"), None)

    from megatron.core import parallel_state

    from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
    from mindspeed_rl.engine import parallel
    from mindspeed_rl.engine.batching import MicroBatching, Rows
    from mindspeed_rl.engine.build import batch_shape, build_model
    from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
    from mindspeed_rl.engine.offload import Offloader
    from mindspeed_rl.engine.streamed_weights import StreamedWeights
    from mindspeed_rl.engine.train_engine import TrainEngine
    from mindspeed_rl.engine.weights import list_model_ops, load_weights
    from mindspeed_rl.models.plan import plan_model
    from mindspeed_rl.models.weights import MemorySource
    from mindspeed_rl.resharding.transfer import WeightStream

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The same numbers for the same name in every layout."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator)
        return 1.0 + 0.1 * noise if len(shape) == 1 and "norm" in name else 0.08 * noise

    def rows() -> Rows:
        """Sixteen sequences of different lengths; on request every two of them begin with the same prompt."""
        generator = torch.Generator().manual_seed(11)
        lengths = [int(n) for n in torch.randint(6, 30, (16,), generator=generator)]
        ids = [torch.randint(0, 128, (n,), generator=generator) for n in lengths]
        prompt = 5 if settings.get("pairs") else 3
        if settings.get("pairs"):
            for first, second in zip(ids[::2], ids[1::2]):
                second[:prompt] = first[:prompt]
        return Rows(ids, [prompt] * len(lengths))

    def negative_log_likelihood(inputs: LossInputs) -> LossOutput:
        loss = -torch.where(inputs.mask, inputs.outputs[0], 0.0).sum()
        seen.append((loss.item(), int(inputs.mask.sum())))
        return LossOutput(loss, inputs.mask.sum())

    folder = Path(os.environ["NPU_SIM_REPORT_DIR"], f"model{os.environ['RANK']}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[settings.get("model", "qwen2")] | settings.get("sizes", {})))
    plan = plan_model(config, folder)
    info = parallel.RankInfo.from_env()
    platform.current().set_device(info.local_rank)
    parallel.init_process_group(info, 120.0)
    parallel._init_model_parallel(config, plan.layout.vpp, 120.0)
    parallel._seed_all(1)
    model = build_model(config, plan, trainable=True)
    shapes = {name: shape for op in list_model_ops(model) for name, shape in zip(op.hf, op.shapes)}
    hf_tensors = {name: tensor(name, tuple(shape)) for name, shape in shapes.items()}
    load_weights(model, MemorySource(hf_tensors))
    shape = batch_shape(
        config,
        packed=settings.get("packed", True),
        pad_id=0,
        shares_prefixes=settings.get("shares_prefixes", False),
        num_predictions=plan.model_config.mtp_num_layers,
    )
    engine = TrainEngine(config, model, shape)
    engine.start_training(1)
    first_step = 0
    if settings.get("load"):
        first_step = load_checkpoint(engine, settings["load"])["iteration"]

    result: dict[str, object] = {"devices": sorted({str(p.device) for m in model.models for p in m.parameters()})}
    seen: list[tuple[float, int]] = []
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batching = MicroBatching(micro_batch_size=2)
    whole = rows()
    if simulated:
        simulator.calls.clear()
    steps = []
    offloader = Offloader(engine.model, engine.optimizer)
    for step in range(first_step, settings.get("steps", 3)):
        seen.clear()
        mine = list(range(16))[(step % 2) * 8 : (step % 2) * 8 + 8][rank::size]
        outcome = engine.train_step(whole.select(mine), batching, negative_log_likelihood)
        counted = parallel.is_output_source()
        steps.append({"loss": sum(l for l, _ in seen) if counted else 0.0, "count": sum(c for _, c in seen) if counted else 0,
                      "grad_norm": outcome.grad_norm})  # fmt: skip
        if counted and plan.model_config.mtp_num_layers:
            steps[-1]["mtp_loss"] = outcome.metrics["mtp_loss"].result()
        if settings.get("stream_each_step"):
            weights = ((name, value.float().cpu().numpy()) for name, value in WeightStream(model).named_tensors())
            sums = {name: zlib.crc32(value.tobytes()) for name, value in weights}
            allocated = round(platform.current().memory_stats().allocated_gib * 2**30)
            resident = engine.offloader.resident_bytes() | {"allocated": allocated}
            steps[-1] |= {"lr": outcome.lr, "weights": sums, "resident": resident}
        if settings.get("offload"):
            before = platform.current().memory_stats().allocated_gib
            copies = Copies()
            with copies:
                offloader.offload(optimizer=True, grads=True, params=True)
            during = platform.current().memory_stats().allocated_gib
            with copies:
                offloader.onload(optimizer=True, grads=True, params=True)
            result["copies"] = [copies.beside, copies.with_others]
            result["memory"] = [before, during, platform.current().memory_stats().allocated_gib]
    result["steps"] = steps
    if simulated:
        result["soc"] = importlib.import_module("torch_npu").npu.get_soc_version()
        result["fused"] = {name: count for name, count in simulator.calls.items() if name.startswith("npu::")}
    if settings.get("save"):
        engine.config = dataclasses.replace(config, save=settings["save"])
        saver = CheckpointSaver(engine, settings["save"])
        saver.save(settings["steps"], {})
        saver.finish()
        result["processes"] = len(multiprocessing.active_children())
    if settings.get("stream"):
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        got = dict(WeightStream(model).named_tensors())
        wrong = [
            name
            for name, value in got.items()
            if settings["steps"] == 0 and not torch.equal(value.cpu(), hf_tensors[name].to(dtype))
        ]
        result["stream"] = {"names": sorted(got) == sorted(hf_tensors), "wrong": wrong}
    if settings.get("reference"):
        reference = build_model(config, plan, trainable=False)
        load_weights(reference, MemorySource(hf_tensors))
        # in place of the trained model
        del engine, offloader, model
        engine = TrainEngine(config, reference, shape)
        if config.stream_ref_weights:
            engine.offloader = StreamedWeights(reference)
        gc.collect()
        engine.forward(whole.select([0]), MicroBatching(micro_batch_size=1))  # what the first pass leaves
        platform.current().reset_peak_memory()
        before = platform.current().memory_stats().allocated_gib
        passes = [engine.forward(whole.select([0, 1, 2]), MicroBatching(micro_batch_size=1)) for _ in range(2)]
        after = platform.current().memory_stats()
        memory = [before, after.peak_gib, after.allocated_gib]
        result["reference"] = {"memory": [round(gib * 2**30) for gib in memory], "resident": engine.offloader.resident_bytes()}
        result["reference"]["passes"] = [outputs and [values.tolist() for values in outputs[0]] for outputs in passes]
    forward = engine.forward(whole.select([0, 1, 2]), MicroBatching(micro_batch_size=3))
    if forward is not None:
        result["log_probs"] = [values.tolist() for values in forward[0]]
    report(result)


if __name__ == "__main__":
    main()

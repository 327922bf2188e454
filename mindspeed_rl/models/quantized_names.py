"""Matrices that rollout engines have quantized (`generate_config.quantization`): names, formats, and rows on a rank."""

from __future__ import annotations

import re

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.quantized_formats import PAIRED_EXPERTS, QUANTIZED_FORMATS, find_format
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig

#: matrices of attention, MLP and experts of the language model. The format of the run is kept by embedding, head, norms,
#: routers and the tower of a model of images; by `kv_b_proj`, out of which engines fold further matrices; and by the
#: projections of a gated delta net's decay and step (`in_proj_a`, `_b`, `_ba`), which have one row per head
_QUANTIZED = re.compile(
    r"\.layers\.\d+\..*(?<!\bkv_b)(_proj|\bkv_a_proj_with_mqa|\bin_proj_(qkvz?|z)|\bexperts\.\d+\.w[123])\.weight$"
)


def is_quantized(name: str) -> bool:
    """Return True for the HF name of a matrix that engines have quantized."""
    return _QUANTIZED.search(name) is not None


#: matrices of routed experts, each by itself
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def name_matrix_format(name: str, quantization: str) -> str:
    """Return the format of a quantized matrix.

    Args:
        name: HF name of the matrix.
        quantization: format of the engine (`find_format`).
    """
    others = QUANTIZED_FORMATS[quantization].others
    return quantization if others is None or _EXPERT.search(name) else others


def explain_divided_blocks(
    family: Architecture, model_config: ModelConfig, layout: Layout, generate: GenerateConfig, platform: str
) -> str:
    """Return where elements that share a scale are on different ranks of the trainer or of an engine; "" if nowhere.

    It follows "is not available".

    Args:
        family: of the actor, with its table of weights.
        model_config: its shape.
        layout: layout of the trainer.
        generate: keys of the engine, with `quantization`.
        platform: device kind of the engines.
    """
    assert generate.quantization is not None
    form = find_format(generate.quantization, platform)
    infer = 1 if generate.enable_expert_parallel else generate.infer_tensor_parallel_size
    trained = {"tp": layout.tp, "etp": layout.expert_tp_size}
    served = {"tp": generate.infer_tensor_parallel_size, "etp": infer}
    for op in family.weight_ops(model_config, ExpertPacking("grouped", 1)):
        for name, shape, split in zip(op.hf, op.shapes, op.splits):
            if len(shape) != 2 or not is_quantized(name):
                continue
            block = QUANTIZED_FORMATS[name_matrix_format(name, form)].block
            if block is None:
                continue
            # engines on NPUs store the scales of two blocks of an expert together
            pair = PAIRED_EXPERTS if platform == "npu" and form == "mxfp8" and _EXPERT.search(name) else block
            for side, ranks, size in (("trainer", trained, block), ("rollout engine", served, pair)):
                count = ranks[op.axis] if split.dim == 1 else 1
                if shape[1] % (size * count):
                    return (
                        f"without a multiple of {size} elements of a row on each rank: {name} has {shape[1]}, on {count} "
                        f"tensor-parallel ranks of the {side}; use {'fewer ranks' if shape[1] % size == 0 else 'int8'}, or "
                        "leave it out"
                    )
    return ""

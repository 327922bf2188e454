"""Names of the matrices that rollout engines have quantized (`generate_config.quantization`)."""

from __future__ import annotations

import re

from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS

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

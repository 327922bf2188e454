"""Names of the matrices that rollout engines have quantized (`generate_config.quantization`)."""

from __future__ import annotations

import re

#: matrices of attention, MLP and experts of the language model. The format of the run is kept by embedding, head, norms,
#: routers and the tower of a model of images; by `kv_b_proj`, out of which engines fold further matrices; and by the
#: projections of a gated delta net's decay and step (`in_proj_a`, `_b`, `_ba`), which have one row per head
_QUANTIZED = re.compile(
    r"\.layers\.\d+\..*(?<!\bkv_b)(_proj|\bkv_a_proj_with_mqa|\bin_proj_(qkvz?|z)|\bexperts\.\d+\.w[123])\.weight$"
)


def is_quantized(name: str) -> bool:
    """Return True for the HF name of a matrix that engines have quantized."""
    return _QUANTIZED.search(name) is not None

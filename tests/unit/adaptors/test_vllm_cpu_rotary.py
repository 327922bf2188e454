"""Parts of heads, as latent attention has them rotated, are rotated by the angles of their tokens, and nothing else changes."""

from __future__ import annotations

from vllm_program import run_program

PROGRAM = """
import json, os
os.environ.update(RANK="0", LOCAL_RANK="0", VLLM_LOGGING_LEVEL="ERROR")
import torch
from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("rollout")
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

with set_current_vllm_config(VllmConfig()):
    rope = RotaryEmbedding(64, 64, 512, 10000, False, torch.float32)
positions = torch.tensor([3, 9, 400])
query, latent = torch.randn(3, 4, 96), torch.randn(3, 576)
angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)


def turned(parts):  # pairs of neighbours are complex numbers
    numbers = torch.view_as_complex(parts.double().reshape(3, -1, 32, 2))
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None]).reshape(parts.shape)


wanted = turned(query[..., 32:]), turned(latent[:, 512:].unsqueeze(1))
kept = latent[:, :512].clone()
found = rope.forward_cpu(positions, query[..., 32:], latent[:, 512:].unsqueeze(1))
flat = rope.forward_cpu(positions, torch.cat([query.reshape(3, -1)] * 2, -1)[:, :256], None)
print(json.dumps({
    "errors": [(one - other).abs().max().item() for one, other in zip(found, wanted)],
    "shapes": [list(one.shape) for one in found],
    "latents kept": torch.equal(latent[:, :512], kept),
    "rows": list(flat[0].shape),
}))
"""


def test_heads_are_rotated_by_their_tokens_angles_and_the_latents_beside_them_stay() -> None:
    result = run_program(PROGRAM)
    assert max(result["errors"]) < 1e-4  # angles of float32 at position 400
    assert result["shapes"] == [[3, 4, 64], [3, 1, 64]] and result["latents kept"] and result["rows"] == [3, 256]

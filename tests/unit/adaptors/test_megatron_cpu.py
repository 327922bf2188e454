"""The CPU adaptor changes Megatron and nothing else, and only what still has to be changed."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import patient

from mindspeed_rl.adaptors import megatron_cpu
from mindspeed_rl.adaptors.torch_facade import facade
from mindspeed_rl.engine.sequence_layout import zigzag_positions

HERE = Path(__file__).parent


def printed_by(program: str) -> dict[str, Any]:
    """The last line of a program that runs in a process of its own."""
    # what other tests have told torch of this process is not told to that one
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    environment = {**inherited, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / f"{program}.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(300))
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_every_loaded_megatron_module_sees_the_facade_and_torch_itself_is_untouched() -> None:
    result = printed_by("adapted_engine")
    assert result["modules"] > 100
    assert result["real torch"] == []
    assert result["torch unchanged"] and result["cuda available"] == [False, False]
    assert result["facade device"] == "cpu" and result["facade is a device type"]
    assert result["other libraries"] == []


def test_the_patches_of_the_installed_release_are_those_it_still_needs() -> None:
    needed = printed_by("unadapted_megatron")
    ours = megatron_cpu._patches_for(importlib.metadata.version("megatron-core"))
    for symbol, is_needed in needed.items():
        name = symbol.split(" ")[0]
        assert is_needed == (name in {"facade", "Tensor.cuda", *ours}), symbol
    assert {symbol.split(" ")[0] for symbol in needed} == {"facade", "Tensor.cuda", *megatron_cpu._PATCHES}


def test_a_patch_ends_with_the_last_release_that_has_its_symbol() -> None:
    of_016, of_017, *later = (set(megatron_cpu._patches_for(f"{release}.1")) for release in megatron_cpu._SUPPORTED_VERSIONS)
    assert of_016 == set(megatron_cpu._PATCHES) and all(patches == of_017 for patches in later)
    assert of_016 - of_017 == {
        "transformer.multi_latent_attention",
        "transformer.moe.experts",
        "transformer.moe.grouped_gemm_util",
    }


def test_the_adaptor_refuses_to_come_late() -> None:
    code = (
        "import warnings; warnings.filterwarnings('ignore'); import megatron.core.parallel_state\n"
        "from mindspeed_rl.adaptors import megatron_cpu; megatron_cpu.apply()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert "megatron.core was imported before its CPU adaptor" in result.stderr


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torchs_bit_for_bit(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((7, 5), (11,), (3, 2, 2))]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    keys = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizers = megatron_cpu.AdamW(ours, **keys), torch.optim.AdamW(theirs, **keys, fused=True)
    for step in range(20):
        for mine, true in zip(ours, theirs):
            gradient = torch.randn(mine.shape, generator=generator)
            mine.grad, true.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 3e-3 / (step + 1)
            optimizer.step()
        assert all(torch.equal(mine, true) for mine, true in zip(ours, theirs))


def test_adamw_counts_steps_by_group_and_skips_parameters_without_gradient() -> None:
    with_gradient, without = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = megatron_cpu.AdamW([with_gradient, without], lr=0.1)
    with_gradient.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert without not in optimizer.state and torch.equal(without, torch.ones(2))
    assert "step" not in optimizer.state[with_gradient]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_packed_sequences_are_rotated_as_each_of_them_alone(cp_size: int) -> None:
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    generator = torch.Generator().manual_seed(cp_size)
    lengths = [2 * cp_size * count for count in (3, 1, 0, 5, 2)]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    states = torch.randn(sum(lengths), 3, 8, generator=generator)
    angles = torch.randn(max(lengths), 1, 1, 8, generator=generator)
    alone = torch.cat(
        [rope._apply_rotary_pos_emb_bshd(x[:, None], angles[: len(x)])[:, 0] for x in states.split(lengths) if len(x)]
    )
    for cp_rank in range(cp_size):
        held = zigzag_positions(lengths, cp_size, cp_rank)
        group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank)  # noqa: B023  (used in this round only)
        packed = rope._apply_rotary_pos_emb_thd(states[held], ends, angles, cp_group=group)
        assert torch.equal(packed, alone[held])


def test_factories_read_cuda_as_the_cpu_and_pass_everything_else_on() -> None:
    assert facade.empty(2, device="cuda").device == facade.tensor([1.0], device=torch.device("cuda", 3)).device
    assert facade.zeros(2, pin_memory=True, dtype=torch.int32).dtype == torch.int32
    assert facade.device("cuda", 1) == torch.device("cpu") and facade.device("meta") == torch.device("meta")
    assert facade.nn is torch.nn and facade.float32 is torch.float32


def test_events_measure_time_and_streams_are_all_the_same() -> None:
    start, end = (facade.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 60e3
    assert facade.cuda.Stream() == facade.cuda.current_stream()
    with facade.cuda.stream(facade.cuda.Stream()):
        assert facade.cuda.current_device() == torch.device("cpu")

"""The simulator itself: what is real stays real, what is computed equals the CPU, what is not simulated says so."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import simulator
import torch
import torch_npu
from quantized_reference import round_blocks

from mindspeed_rl import platform
from mindspeed_rl.platform import ProfileSettings
from mindspeed_rl.platform.npu import NpuPlatform


def test_a_copy_to_the_host_takes_no_memory_of_the_device() -> None:
    source, target = torch.arange(1 << 20, device="npu:0"), torch.empty(1 << 20, dtype=torch.int64)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    assert target.copy_(source).device.type == "cpu" and int(target[-1]) == (1 << 20) - 1
    assert torch.npu.max_memory_allocated() == before


def test_training_a_small_network_is_bit_equal_to_the_cpu() -> None:
    torch.manual_seed(0)
    on_cpu = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    on_npu = copy.deepcopy(on_cpu).to("npu")
    batch = torch.randn(5, 8)
    for network, rows in ((on_cpu, batch), (on_npu, batch.to("npu"))):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            network(rows).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
    for mine, theirs in zip(on_cpu.parameters(), on_npu.parameters()):
        assert torch.equal(mine, theirs.cpu())


@pytest.mark.parametrize("shape", [(2, 8, 64)])
def test_fused_operators_equal_their_definitions_and_pass_gradients(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to("npu").requires_grad_()
    gamma = torch.randn(shape[-1]).to("npu").requires_grad_()
    cos, sin = torch.randn(shape).to("npu"), torch.randn(shape).to("npu")
    a, g = (tensor.detach().cpu().requires_grad_() for tensor in (x, gamma))
    first, second = a.chunk(2, -1)
    cases = [
        (torch_npu.npu_rms_norm(x, gamma, 1e-6)[0], torch.nn.functional.rms_norm(a, (shape[-1],), g, 1e-6)),
        (torch_npu.npu_swiglu(x, -1), torch.nn.functional.silu(first) * second),
        (torch_npu.npu_rotary_mul(x, cos, sin), a * cos.cpu() + torch.cat([-second, first], -1) * sin.cpu()),
    ]
    for got, want in cases:
        assert torch.allclose(got.cpu(), want, atol=1e-6)
        upstream = torch.randn_like(want)
        (mine,) = torch.autograd.grad(got, x, upstream.to("npu"), retain_graph=True)
        (theirs,) = torch.autograd.grad(want, a, upstream, retain_graph=True)
        assert torch.allclose(mine.cpu(), theirs, atol=1e-5)


def test_a_snapshot_has_every_allocation_of_the_block_with_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "actor_update_1" / "memory_snapshot.pickle"
    with NpuPlatform().record_allocations(path):
        made = torch.ones(4 * 2**20, dtype=torch.uint8, device="npu")
    del made
    with path.open("rb") as file:
        events = pickle.load(file)["device_traces"][torch.npu.current_device()]  # written a moment ago, by this process
    (event,) = [event for event in events if event["action"] == "alloc" and event["size"] >= 4 * 2**20]
    assert any(frame["filename"] == __file__ for frame in event["frames"])


def test_random_numbers_follow_the_device_generator() -> None:
    device = NpuPlatform()
    device.rng_module.manual_seed(3)
    state = device.rng_module.get_rng_state()
    first, second = torch.rand(4, device="npu"), torch.rand(4, device="npu")
    device.rng_module.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="npu"), first) and not torch.equal(first, second)


def test_a_separate_generator_decides_the_samples_and_does_not_change_the_device_s() -> None:
    device = NpuPlatform()
    device.rng_module.manual_seed(3)
    state = device.rng_module.get_rng_state()
    mine, same, other = (torch.Generator(device="npu").manual_seed(seed) for seed in (7, 7, 8))
    first, second = (torch.empty(4, device="npu").exponential_(generator=mine) for _ in range(2))
    assert torch.equal(torch.empty(4, device="npu").exponential_(generator=same), first) and not torch.equal(first, second)
    assert not torch.equal(torch.empty(4, device="npu").exponential_(generator=other), first)
    assert torch.equal(device.rng_module.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="generator of cpu"):
        torch.rand(4, device="npu", generator=torch.Generator())


def test_the_platform_layer_reports_what_the_allocator_holds() -> None:
    device = platform.select("npu")
    device.set_device(0)
    device.empty_cache()
    before = device.memory_stats()
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device.current_device())
    during = device.memory_stats()
    assert during.allocated_gib - before.allocated_gib == pytest.approx(1 / 16, rel=1e-3)
    assert during.peak_gib >= during.allocated_gib
    del block
    device.empty_cache()
    torch.npu.reset_peak_memory_stats()
    assert device.memory_stats().allocated_gib == pytest.approx(before.allocated_gib)
    assert device.memory_stats().peak_gib == pytest.approx(before.allocated_gib)


def test_a_storage_can_be_emptied_and_filled_again() -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32, device="npu")
    host, size = tensor.cpu().pin_memory(), tensor.untyped_storage().size()
    before = torch.npu.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert 0 <= before - torch.npu.memory_allocated() - size <= 512  # the allocator's rounding
    tensor.untyped_storage().resize_(size)
    tensor.copy_(host, non_blocking=True)
    assert torch.equal(tensor.cpu(), host)


def test_memory_beyond_the_devices_is_an_out_of_memory_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(65 << 30, dtype=torch.uint8, device="npu")


def test_the_profiler_runs_through_the_platform(tmp_path: Path) -> None:
    with NpuPlatform().profile(str(tmp_path), ProfileSettings(shapes=True, level="1", export="db")) as session:
        torch.ones(3, device="npu") + 1
        session.step()
    assert any(tmp_path.rglob("*")), "the profiler wrote nothing"


def test_a_profile_of_nothing_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="neither host nor device activity"),
        NpuPlatform().profile(str(tmp_path), ProfileSettings(host=False, device=False)),
    ):
        pass


@pytest.mark.slow
def test_what_holds_without_the_packages_holds_with_them() -> None:
    files = ("platform/test_npu_platform.py", "npu/test_mindspeed_settings.py", "npu/test_vllm_ascend.py")
    # the conftest of the unit tests fits Megatron to the CPU
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        *(f"tests/unit/{file}" for file in files),
    ]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_events_measure_time_and_streams_exist() -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(torch.npu.Stream()):
        start.record()
        end.record()
    NpuPlatform().synchronize()
    assert start.elapsed_time(end) >= 0.0


def test_the_device_count_comes_from_the_environment() -> None:
    assert NpuPlatform().device_module.device_count() == 8 and NpuPlatform.is_available()
    with pytest.raises(RuntimeError):
        NpuPlatform().set_device(77)


def test_calls_are_counted_by_operator() -> None:
    simulator.calls.clear()
    torch.ones(2, device="npu") + torch.ones(2, device="npu")
    assert simulator.calls["aten::add.Tensor"] == 1


def test_an_operator_without_a_kernel_fails_with_its_name() -> None:
    x = torch.ones(2, 8, device="npu")
    with pytest.raises(RuntimeError, match="aclnn"):
        torch_npu.npu_gelu(x)


def test_a_runtime_call_that_is_not_simulated_ends_the_process_and_is_named() -> None:
    code = "import ctypes; ctypes.CDLL('libascendcl.so').rtKernelLaunch()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode < 0 and "rtKernelLaunch is not simulated" in ended.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actual_seq_qlen": [4, 6], "actual_seq_kvlen": [4, 6]}, "ends at 6 of 8 tokens"),
        ({}, "needs actual_seq_qlen"),
        ({"actual_seq_qlen": [8], "actual_seq_kvlen": [8], "sparse_mode": 3}, "2048 x 2048"),
    ],
)
def test_attention_refuses_what_the_kernel_refuses(settings: dict, message: str) -> None:
    x = torch.randn(8, 2, 16, device="npu")
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_fusion_attention(x, x, x, 2, "TND", **settings)


def test_a_torch_file_written_from_the_device_loads_again(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(4.0, device="npu")}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, map_location="cpu")
    assert loaded["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_kernels_of_latent_attention_refuse_widths_that_the_devices_are_not_built_for() -> None:
    head, angles = torch.ones(1, 2, 1, 32, device="npu"), torch.ones(1, 1, 1, 32, device="npu")
    with pytest.raises(RuntimeError, match="32 numbers, and the device's kernel is built for 64"):
        torch_npu.npu_interleave_rope(head, angles, angles)
    cache = torch.zeros(2, 4, 1, 64, device="npu")
    with pytest.raises(RuntimeError, match="16 numbers, and the device's kernel is built for 512"):
        torch_npu.npu_kv_rmsnorm_rope_cache(
            torch.ones(1, 1, 1, 80, device="npu"), torch.ones(16, device="npu"), angles, angles,
            torch.zeros(1, dtype=torch.int64, device="npu"), cache, cache, cache_mode="PA",
        )  # fmt: skip


def test_neighbours_are_rotated_and_come_out_as_halves() -> None:
    # by a quarter turn the pair (a, b) becomes (-b, a)
    head = torch.arange(64.0, device="npu").reshape(1, 1, 1, 64)
    turned = torch_npu.npu_interleave_rope(head, torch.zeros_like(head), torch.ones_like(head)).flatten().tolist()
    assert turned == [-float(number) for number in range(1, 64, 2)] + [float(number) for number in range(0, 64, 2)]


def test_latent_keys_are_written_to_their_rows_and_padding_nowhere() -> None:
    kv = torch.ones(3, 1, 1, 576, device="npu") * torch.tensor([1.0, 2.0, 3.0], device="npu").reshape(3, 1, 1, 1)
    cos, sin = torch.ones(3, 1, 1, 64, device="npu"), torch.zeros(3, 1, 1, 64, device="npu")
    rotated, latent = torch.zeros(2, 4, 1, 64, device="npu"), torch.zeros(2, 4, 1, 512, device="npu")
    slots = torch.tensor([6, -1, 1], device="npu")
    gamma = torch.full((512,), 5.0, device="npu")
    torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, slots, rotated, latent, epsilon=0.0, cache_mode="PA")
    assert rotated[..., 0].flatten().tolist() == [0, 3, 0, 0, 0, 0, 1, 0]
    assert latent[..., -1].flatten().tolist() == pytest.approx([0, 5, 0, 0, 0, 0, 5, 0])  # 5 x / rms(x), and all x are alike


def test_a_graph_reads_the_addresses_that_it_captured() -> None:
    weight, rows = torch.randn(8, 8).to("npu"), torch.zeros(4, 8).to("npu")

    def compute() -> torch.Tensor:
        product = rows @ weight
        held = torch.empty_like(product)
        held.copy_(product.relu() + 1)
        return held.sum(-1)

    compute()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = compute()
    others = [torch.full((4, 8), 7.0).to("npu") for _ in range(20)]  # memory of what the capture made stays its own
    rows.copy_(torch.randn(4, 8))
    graph.replay()
    assert torch.allclose(result.cpu(), compute().cpu()) and all((other == 7).all() for other in others)
    weight.mul_(2)
    graph.replay()
    assert torch.allclose(result.cpu(), compute().cpu())
    before, old, weight = result.cpu(), weight, weight * 3
    graph.replay()
    assert old is not weight and torch.equal(result.cpu(), before) and not torch.allclose(result.cpu(), compute().cpu())


def test_a_graph_holds_neither_memory_nor_decisions_of_the_host() -> None:
    rows = torch.zeros(4, 8).to("npu")
    with pytest.raises(RuntimeError, match="needs a result on the host"), torch.npu.graph(torch.npu.NPUGraph()):
        rows.sum().item()
    with pytest.raises(RuntimeError, match="of the host's memory"), torch.npu.graph(torch.npu.NPUGraph()):
        rows.copy_(torch.ones(4, 8))
    mask, places = rows[:, 0] == 0, torch.tensor([2, 0]).to("npu")
    with pytest.raises(RuntimeError, match="needs a result on the host"), torch.npu.graph(torch.npu.NPUGraph()):
        rows[mask]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):  # the shape of indices is known
        chosen = rows[places]
    rows.copy_(torch.arange(32.0).view(4, 8))
    graph.replay()
    assert chosen[:, 0].tolist() == [16, 0]


def test_a_graph_waits_for_its_event_and_has_the_parameters_of_the_update() -> None:
    query, out, lse = torch.randn(1, 2, 16).to("npu"), torch.zeros(1, 2, 16).to("npu"), torch.zeros(1).to("npu")
    key, value = (torch.randn(4, 128, 32).to("npu") for _ in range(2))
    table = torch.tensor([[0, 1]], dtype=torch.int32).to("npu")
    settings = {"block_table": table, "input_layout": "TND", "block_size": 128, "num_key_value_heads": 2, "num_heads": 2}
    settings |= {"scale": 0.25, "sparse_mode": 3, "actual_seq_lengths": [1]}
    attend, event, graph = torch_npu.npu_fused_infer_attention_score, torch.npu.ExternalEvent(), torch.npu.NPUGraph()

    def write(length: int) -> None:
        attend.out(query, key, value, **settings, actual_seq_lengths_kv=[length], workspace=out, out=[out, lse])

    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        write(5)
        handle = torch.npu.graph_task_group_end(stream)
        doubled = out * 2
    beside = torch.npu.Stream()
    for length in (9, 3):
        graph.replay()
        with pytest.raises(RuntimeError, match="nobody has recorded"):
            query + 1
        with torch.npu.stream(beside):
            torch.npu.graph_task_update_begin(beside, handle)
            write(length)
            torch.npu.graph_task_update_end(beside)
            event.record(beside)
        expected = attend(query, key, value, **settings, actual_seq_lengths_kv=[length])[0]
        assert torch.allclose(doubled.cpu(), 2 * expected.cpu())


def test_attention_to_chunks_is_merged_to_attention_to_all_keys() -> None:
    scores, values = torch.randn(6, 5), torch.randn(6, 5, 3)
    chunks = [slice(0, 2), slice(2, 5)]
    lse = [scores[:, chunk].logsumexp(-1) for chunk in chunks] + [torch.full((6,), float("inf"))]  # no keys
    parts = [torch.einsum("nk,nkd->nd", scores[:, chunk].softmax(-1), values[:, chunk]) for chunk in chunks]
    parts += [torch.zeros(6, 3)]
    out, total = torch_npu.npu_attention_update([x.to("npu") for x in lse], [x.to("npu") for x in parts], 0)
    assert torch.allclose(out.cpu(), torch.einsum("nk,nkd->nd", scores.softmax(-1), values), atol=1e-6)
    assert torch.allclose(total.cpu(), scores.logsumexp(-1))


def test_rows_of_a_cache_are_loaded_from_the_blocks_of_their_sequence() -> None:
    cache = torch.arange(4 * 2 * 3.0).reshape(4, 2, 1, 3)
    key, value = (torch.empty(5, 1, 3).to("npu") for _ in range(2))
    integers = [torch.tensor(x, dtype=torch.int32).to("npu") for x in ([[3, 0], [1, 2]], [3, 2], [0, 2])]
    table, lengths, starts = integers
    load = torch_npu.atb.npu_paged_cache_load
    load(cache.to("npu"), -cache.to("npu"), table, lengths, seq_starts=starts, key=key, value=value)
    expected = torch.stack([cache[3, 0], cache[3, 1], cache[0, 0], cache[2, 0], cache[2, 1]])
    assert torch.equal(key.cpu(), expected) and torch.equal(value.cpu(), -expected)


def test_grouped_products_of_int8_with_int4_are_those_of_whole_numbers_with_the_scales_of_their_groups() -> None:
    torch.manual_seed(0)
    rows = torch.randint(-127, 128, (5, 512), dtype=torch.int8)
    weights = torch.randint(-8, 8, (3, 512, 16))  # 3 matrices of 16 columns, in groups of 256
    scales, token_scales = (torch.rand(3, 2, 16) / 100).half().float(), torch.rand(5) / 100
    counts, owners = torch.tensor([2, 0, 3]), [0, 0, 2, 2, 2]
    packed = torch.zeros(3, 512, 2, dtype=torch.int64)
    for column in range(16):
        packed[..., column // 8] += (weights[..., column] % 16) << 4 * (column % 8)
    packed = torch.where(packed < 1 << 31, packed, packed - (1 << 32)).int()
    bias = torch.zeros(3, 16)
    for k in range(512):
        bias += 8 * weights[:, k] * scales[:, k // 256]
    stored = torch.zeros(3, 2, 16, 2)
    stored[..., 0] = scales
    given = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts.to("npu")}
    tensors = {"x": [rows.to("npu")], "weight": [packed.to("npu")], "per_token_scale": [token_scales.to("npu")]}
    whole = {"scale": [stored.view(torch.int64)[..., 0].to("npu")], "bias": [bias.to("npu")]}
    (result,) = torch_npu.npu_grouped_matmul(**tensors, **given, **whole, output_dtype=torch.float32)
    for row, owner in enumerate(owners):
        for column in range(16):
            parts = [0.0, 0.0]
            for k in range(512):
                parts[k // 256] += int(rows[row, k]) * int(weights[owner, k, column])
            total = sum(part * scales[owner, index, column].item() for index, part in enumerate(parts))
            assert result[row, column].item() == pytest.approx(total * token_scales[row].item(), rel=1e-5, abs=1e-4)
    # without its sums the kernel's product is with x - 8
    (shifted,) = torch_npu.npu_grouped_matmul(
        **tensors, **given, **whole | {"bias": [torch.zeros(3, 16).to("npu")]}, output_dtype=torch.float32
    )
    lacking = result.cpu() - shifted.cpu()
    assert torch.allclose(lacking, bias[owners] * token_scales[:, None], rtol=1e-3, atol=1e-4)
    damaged = stored.clone()
    damaged[..., 1] = 1.0
    for wrong, message in (
        ({"group_list_type": 0}, "groups are counts"),
        ({"bias": None}, "bias in float32"),
        ({"scale": [damaged.view(torch.int64)[..., 0].to("npu")]}, "bits of float32"),
        ({"scale": [stored.view(torch.int64)[:, :1, :, 0].to("npu")]}, "of int4 matrices"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch_npu.npu_grouped_matmul(**tensors, **given | whole | {"output_dtype": torch.bfloat16} | wrong)


def test_grouped_products_in_int8_are_those_of_whole_numbers_with_their_scales() -> None:
    torch.manual_seed(0)
    rows, weights = torch.randint(-127, 128, (5, 8), dtype=torch.int8), torch.randint(-127, 128, (3, 8, 4), dtype=torch.int8)
    counts, owners = torch.tensor([2, 0, 3]), [0, 0, 2, 2, 2]
    scales, token_scales = torch.rand(3, 4) / 100, torch.rand(5) / 100  # of products of some hundred thousand
    given = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts.to("npu")}
    exact = torch.stack([rows[row].long() @ weights[owner].long() for row, owner in enumerate(owners)])
    tensors = {"x": [rows.to("npu")], "weight": [weights.to("npu")]}
    (sums,) = torch_npu.npu_grouped_matmul(**tensors, **given, output_dtype=torch.int32)
    assert torch.equal(sums.cpu().long(), exact)
    with_scales = {"scale": [scales.to("npu")], "per_token_scale": [token_scales.to("npu")], "output_dtype": torch.float32}
    (scaled,) = torch_npu.npu_grouped_matmul(**tensors, **given, **with_scales)
    assert torch.allclose(scaled.cpu(), (exact.double() * scales.double()[owners] * token_scales.double()[:, None]).float())
    with pytest.raises(RuntimeError, match="without scales give int32"):
        torch_npu.npu_grouped_matmul(**tensors, **given, output_dtype=torch.bfloat16)
    # silu(gate) up of the scaled sums, in int8 again
    out, out_scales = torch.ops._C_ascend.npu_dequant_swiglu_quant(
        x=sums,
        weight_scale=scales.to("npu"),
        activation_scale=token_scales.to("npu"),
        group_index=counts.to("npu"),
        activate_left=True,
        quant_mode=1,
    )
    gate, up = (exact.double() * scales.double()[owners] * token_scales.double()[:, None]).chunk(2, -1)
    inner = gate / (1 + torch.exp(-gate)) * up
    largest = inner.abs().amax(-1)
    assert torch.allclose(out_scales.cpu().double(), largest / 127, rtol=1e-5)
    assert (out.cpu().double() - inner / largest[:, None] * 127).abs().max() <= 0.5 + 1e-4


def test_mx_products_are_those_of_the_numbers_that_their_blocks_stand_for() -> None:
    torch.manual_seed(0)
    kind = {"scale_dtype": torch_npu.float8_e8m0fnu}
    x, weights = torch.randn(5, 96) * torch.exp2(torch.randint(-9, 9, (5, 1))), torch.randn(3, 16, 96)
    elements, scales = torch_npu.npu_dynamic_mx_quant(x.to("npu"), dst_type=torch.float8_e4m3fn)
    # three blocks of a row: two pairs of scales, of which the last one is none
    assert elements.dtype == torch.float8_e4m3fn and scales.shape == (5, 2, 2) and not scales[:, 1, 1].any()
    for row in range(5):
        for block in range(3):
            part = x[row, 32 * block : 32 * block + 32]
            exponent = math.floor(math.log2(float(part.abs().max()))) - 8
            assert int(scales[row, block // 2, block % 2]) == exponent + 127
            found = elements[row, 32 * block : 32 * block + 32].cpu().double() * 2.0**exponent
            assert torch.equal(found, round_blocks(part.double()))
    stored, weight_scales = torch_npu.npu_dynamic_mx_quant(weights.to("npu"), dst_type=torch.float8_e4m3fn)
    columns, column_scales = stored.transpose(1, 2), weight_scales.transpose(1, 2)  # [3, 96, 16], [3, 2, 16, 2]
    exact = torch.stack([round_blocks(x.double()) @ round_blocks(weight.double()).t() for weight in weights])
    product = torch_npu.npu_quant_matmul(
        elements,
        columns[1].contiguous(),
        column_scales[1].contiguous(),
        **kind,
        pertoken_scale=scales,
        pertoken_scale_dtype=torch_npu.float8_e8m0fnu,
        output_dtype=torch.float32,
        group_sizes=[1, 1, 32],
    )
    assert torch.equal(product.cpu(), exact[1].float())
    owners = [0, 0, 2, 2, 2]
    (sums,) = torch_npu.npu_grouped_matmul(
        x=[elements],
        weight=[columns],
        scale=[column_scales],
        **kind,
        per_token_scale=[scales],
        per_token_scale_dtype=torch_npu.float8_e8m0fnu,
        split_item=2,
        group_type=0,
        group_list_type=1,
        group_list=torch.tensor([2, 0, 3]).to("npu"),
        output_dtype=torch.bfloat16,
    )
    grouped = torch.stack([exact[owner, row] for row, owner in enumerate(owners)])
    assert torch.equal(sums.cpu(), grouped.bfloat16())
    out, out_scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x=elements,
        weight=[columns],
        group_list=torch.tensor([2, 2, 5]).to("npu"),
        weight_scale=[column_scales],
        x_scale=scales,
        dequant_mode=2,
        quant_mode=2,
        dequant_dtype=torch.float32,
        quant_dtype=torch.float8_e4m3fn,
        weight_scale_dtype=torch_npu.float8_e8m0fnu,
        x_scale_dtype=torch_npu.float8_e8m0fnu,
    )
    gate, up = grouped.chunk(2, -1)
    inner = gate / (1 + torch.exp(-gate)) * up
    powers = torch.exp2(out_scales.cpu().double() - 127)[:, 0, :1]
    assert (out.cpu().double() * powers - inner).abs().max() <= inner.abs().max() / 16  # half a step of three bits
    with pytest.raises(RuntimeError, match="scales in float8_e8m0fnu"):
        torch_npu.npu_quant_matmul(elements, columns[1], column_scales[1], pertoken_scale=scales, group_sizes=[1, 1, 32])


def test_adapters_are_multiplied_with_the_rows_of_their_own() -> None:
    rows, down, up = torch.randn(5, 8).bfloat16(), torch.randn(2, 1, 4, 8).bfloat16(), torch.randn(2, 1, 6, 4).bfloat16()
    shrunk, out = torch.zeros(5, 4).to("npu"), torch.ones(5, 10).bfloat16().to("npu")
    owners = [0, -1, 1, 1, 0]
    torch.ops._C_ascend.bgmv_shrink(rows.to("npu"), down.to("npu"), torch.tensor(owners).to("npu"), shrunk, 0.5)
    expected = torch.zeros(5, 4)
    for row, owner in enumerate(owners):
        if owner >= 0:
            expected[row] = 0.5 * down[owner, 0].float() @ rows[row].float()
    assert torch.allclose(shrunk.cpu(), expected, atol=1e-5)
    # a batch of two sequences: two rows of adapter 1, three rows without one
    batch = [torch.tensor(x).to("npu") for x in ([1, -1], [2, 3])]
    torch.ops._C_ascend.sgmv_expand(shrunk, up.to("npu"), *batch, out, 3, 6)
    grown = torch.ones(5, 10)
    grown[:2, 3:9] += expected[:2] @ up[1, 0].float().t()
    assert torch.allclose(out.float().cpu(), grown, atol=5e-2)
    with pytest.raises(RuntimeError, match="only support half and bf16"):
        torch.ops._C_ascend.bgmv_shrink(rows.to("npu"), down.float().to("npu"), torch.tensor(owners).to("npu"), shrunk, 0.5)

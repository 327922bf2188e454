"""The steps of tools/npu_smoke.sh. Each ends with one line of numbers and a non-zero exit code when they are wrong."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
SIMULATOR = ROOT / "tests" / "npu_sim"
#: loss and gradient norm of the test model's first steps on the CPU in fp32
CPU_STEPS = ROOT / "tests" / "data" / "npu" / "engine_steps.json"
#: fp32 on the device: matrix units may round inputs
TOLERANCE = 5e-3
#: how long the ranks of one step may take: communicators connect in seconds when all is well
RANKS_TIMEOUT_S = 300.0
#: of the rollout step
ITERATIONS = 3
#: torch_npu's number of an Ascend 950
_SOC_950 = 260


def _prepare() -> None:
    if "NPU_SIM_DEVICES" in os.environ:
        import simulator

        simulator.install()


def device() -> str:
    """Numbers of one die: an allocation shows up, a random state repeats, bf16 products are right and overwrite."""
    _prepare()
    import torch

    from mindspeed_rl import platform

    npu = platform.select("npu")
    npu.set_device(0)
    home = npu.current_device()
    before = npu.memory_stats().allocated_gib
    block = torch.ones(64 << 20, dtype=torch.uint8, device=home)
    grown = npu.memory_stats().allocated_gib - before
    assert abs(grown - 1 / 16) < 1e-3, f"64 MiB show up as {grown} GiB"
    del block
    npu.rng_module.manual_seed(1)
    state = npu.rng_module.get_rng_state()
    first = torch.rand(8, device=home)
    npu.rng_module.set_rng_state(state)
    assert torch.equal(first, torch.rand(8, device=home)), "the random state does not repeat"
    left, right = torch.randn(256, 512), torch.randn(512, 128)
    product = (left.bfloat16().to(home) @ right.bfloat16().to(home)).float().cpu()
    error = (product - left.bfloat16().float() @ right.bfloat16().float()).abs().max().item()
    assert error < 0.5, f"bf16 product off by {error}"
    added = _check_sums_and_stores(home)
    npu.synchronize()
    return f"{npu.device_module.device_count()} device(s), bf16 product off by at most {error:.3f}, in a sum by {added:.1e}"


def _check_sums_and_stores(home: torch.device) -> float:
    """A product that adds to a float32 sum is right, and after ATB's, which rollout engines call first, others overwrite.

    ATB's was reported to leave cores of an A3 with CANN 9.1.0 in a state in which they add to what they should overwrite.
    """
    import torch
    import torch_npu

    left, right = torch.randn(512, 128).bfloat16(), torch.randn(512, 256).bfloat16()
    want = 0.5 + left.double().t() @ right.double()
    total = torch.full((1, 128, 256), 0.5, device=home)
    ends = torch.tensor([512], device=home)
    torch_npu.npu_grouped_matmul_add_(total, left.to(home), right.to(home), ends)
    error = (total[0].cpu().double() - want).abs().max().item()
    assert error < 1e-3, f"npu_grouped_matmul_add_ off by {error}"
    if torch_npu.npu.get_soc_version() < _SOC_950:  # which has no such operator
        small = torch.ones(2, 4, dtype=torch.float16, device=home)
        torch_npu._npu_matmul_add_fp32(small, small, torch.zeros(4, 4, device=home))
    ones = torch.ones(4096, 64, dtype=torch.float16, device=home)
    for dtype in (torch.float16, torch.float32):
        # large enough for every core to have a part
        out = torch.full((4096, 4096), 100.0, dtype=dtype, device=home)
        torch.mm(ones.to(dtype), ones.to(dtype).t(), out=out)
        stored = out.unique().tolist()
        assert stored == [64.0], f"a product of {dtype} does not overwrite its output: {stored[:4]}"
    return error


def _ranks(count: int, arguments: list[str]) -> list[str]:
    """Runs this file once a rank and returns the last line of each; when one fails, the others are ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [open(Path(folder, f"rank{rank}.txt"), "w+") for rank in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
            )
            for rank, output in enumerate(outputs)
        ]
        deadline = time.monotonic() + RANKS_TIMEOUT_S
        codes = [process.poll() for process in processes]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        if any(codes):
            raise SystemExit(", ".join(f"rank {rank} ended with code {code}" for rank, code in enumerate(codes) if code))
        if None in codes:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise SystemExit(f"ranks {running} still ran after {RANKS_TIMEOUT_S:.0f} s")
        return [Path(output.name).read_text().strip().splitlines()[-1] for output in outputs]


def hccl_rank() -> str:
    """One rank's part: sums, gathers, all-to-all and a ring."""
    _prepare()
    import torch
    import torch.distributed as dist

    from mindspeed_rl import platform

    npu = platform.select("npu")
    rank = int(os.environ["RANK"])
    npu.set_device(rank)
    dist.init_process_group(npu.collective_backend)
    size, home = dist.get_world_size(), npu.current_device()
    total = torch.full((1 << 20,), rank + 1.0, device=home)
    dist.all_reduce(total)
    assert total.unique().tolist() == [size * (size + 1) / 2]
    gathered = torch.empty(size, device=home)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)], device=home))
    assert gathered.tolist() == list(range(size))
    received = torch.empty(size, device=home)
    dist.all_to_all_single(received, torch.arange(size, device=home) + 100.0 * rank)
    assert received.tolist() == [100.0 * peer + rank for peer in range(size)]
    ring = torch.empty(4, device=home)
    exchange = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank), device=home), (rank + 1) % size),
        dist.P2POp(dist.irecv, ring, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    assert ring.tolist() == [float((rank - 1) % size)] * 4
    dist.barrier()
    return f"{size} ranks agree"


def engine(tensor_parallel: int, plain: bool, platform_name: str) -> str:
    """Three optimizer steps of the test model against the CPU's numbers."""
    places = [str(SIMULATOR), str(ROOT / "tests"), str(ROOT)]
    sys.path[:0] = places
    from ranks import run_ranks

    want = json.loads(CPU_STEPS.read_text())
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    layout = {"tensor_model_parallel_size": tensor_parallel, "sequence_parallel": True} if tensor_parallel > 1 else {}
    mode = "mindspeed" if platform_name == "npu" else platform_name
    settings = {"mode": mode, "steps": len(want), "layout": layout, "fused_attention": not plain}
    reports = run_ranks("engine", tensor_parallel, settings, timeout_s=900)
    lines = []
    for number, (step, (loss, norm)) in enumerate(zip(zip(*(report["steps"] for report in reports)), want, strict=True)):
        mine = sum(rank["loss"] for rank in step) / sum(rank["count"] for rank in step)
        lines.append(f"{mine:.5f} ({loss:.5f}), {step[0]['grad_norm']:.4f} ({norm:.4f})")
        for got, expected in ((mine, loss), (step[0]["grad_norm"], norm)):
            if abs(got - expected) > TOLERANCE * expected:
                raise SystemExit(f"step {number}: {got} on the {platform_name}, {expected} on the CPU")
    return "loss (CPU), gradient norm (CPU): " + "; ".join(lines)


def _make_experts(folder: Path, num_experts: int) -> None:
    """Replace the quick start's model by a random one with experts, for the same tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    sizes = AutoConfig.from_pretrained(folder)
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
    config = Qwen3MoeConfig(
        **{name: getattr(sizes, name) for name in names},
        head_dim=sizes.hidden_size // sizes.num_attention_heads,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rollout(folder: str, platform_name: str, ranks: int = 0, exchange: str = "auto") -> str:
    """Three GRPO iterations of the quick start's model: rollout, weight update with proof, sleep, wake-up.

    Args:
        ranks: dies that share the experts of a model with experts, in training and in rollout; 0: a dense model.
        exchange: exchange of tokens between them in rollout.
    """
    work = Path(folder, f"quickstart_{exchange}_{ranks}" if ranks else "quickstart")
    (work / "data").mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-m", "mindspeed_rl.cli.main"]
    subprocess.run([sys.executable, "examples/quickstart/make_task.py", str(work)], check=True, cwd=ROOT)
    common = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(work / "model"), "--prompt-type", "empty"]
    for split in ("train", "heldout"):
        handler = ["--handler-name", "R1AlpacaStyleInstructionHandler", "--dataset-additional-keys", "labels"]
        files = ["--input", str(work / "raw" / f"{split}.jsonl"), "--output-prefix", str(work / "data" / split)]
        subprocess.run([*run, "preprocess", *common, *files, *handler], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    on_npu = platform_name == "npu"
    overrides = [
        f"platform={platform_name}",
        f"megatron_training.bf16={str(on_npu).lower()}",
        f"megatron_training.train_iters={ITERATIONS}",
        "megatron_training.eval_interval=1000",
        f"megatron_training.data_path={work}/data/train",
        f"megatron_training.eval_data_path={work}/data/heldout",
        f"megatron_training.tokenizer_name_or_path={work}/model",
        f"actor_config.load={work}/model",
        f"actor_config.save={work}/checkpoint",
        f"generate_config.dtype={'bfloat16' if on_npu else 'float32'}",
        "generate_config.gpu_memory_utilization=0.3",
        "generate_config.offload_train_param=true",
        "generate_config.offload_train_optimizer=true",
        "generate_config.offload_train_grad=true",
        "rl_config.log_probs_diff_limit=0.1",
        "rl_config.entropy_coeff=0.01",  # an untrained model earns no reward: entropy moves the weights
        f"run_dir={work}/run",
    ]
    if ranks:
        _make_experts(work / "model", 2 * ranks)
        overrides += [
            f"+model.tiny_qwen25.num_experts={2 * ranks}",
            f"rl_config.actor_resource.num_npus={ranks}",
            "actor_config.tensor_model_parallel_size=1",
            f"actor_config.micro_batch_size={512 // ranks}",  # each rank's samples in one forward pass, as in the run file
            f"actor_config.expert_model_parallel_size={ranks}",
            "generate_config.infer_tensor_parallel_size=1",
            "generate_config.enable_expert_parallel=true",
            f"generate_config.infer_expert_parallel_size={ranks}",
            f"generate_config.infer_moe_token_dispatcher_type={exchange}",
        ]
    if "NPU_SIM_DEVICES" in os.environ:
        os.environ["NPU_SIM_RUN_DIR"] = str(work)  # goes with the folder, whatever Ray's workers leave there
        overrides.append(f"rl_config.runtime_env_path={SIMULATOR / 'runtime_env.yaml'}")
    subprocess.run([*run, "train", "--config-name", "grpo_tiny_cpu", *overrides], check=True, cwd=ROOT)
    return check_iterations(work / "run" / "metrics.jsonl")


def check_iterations(path: Path) -> str:
    """What the metrics of a short run prove; the process ends with the reason when they do not."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if "rollout/proven_parameters" in line]
    if len(steps) != ITERATIONS:
        raise SystemExit(f"{len(steps)} of {ITERATIONS} iterations in {path}")
    proven = {int(step["rollout/proven_parameters"]) for step in steps}
    versions = [int(step["rollout/weight_version"]) for step in steps]
    if len(proven) != 1 or 0 in proven or versions != sorted(set(versions)):
        raise SystemExit(f"weight updates: {proven} parameters proven, versions {versions}")
    if not all(step["actor/grad_norm"] > 0 for step in steps):
        raise SystemExit("the weights did not change: a gradient norm is 0")
    worst = max(step["rollout/log_probs_diff_max"] for step in steps)
    seconds = ", ".join(f"{step['timing/all']:.1f}" for step in steps)
    return (
        f"{ITERATIONS} iterations of {seconds} s; {proven.pop()} parameters of the engine proven after each update; "
        f"log-probs of rollout and trainer differ by at most {worst:.2g}"
    )


def main() -> None:
    """Runs one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("device", "hccl", "hccl-rank", "engine", "rollout", "experts"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the engine's portable attention instead of the fused one")
    parser.add_argument("--exchange", choices=("auto", "allgather"), default="auto", help="of tokens between experts")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--platform", choices=("npu", "cpu"), default="npu", help="cpu: a rehearsal of engine and rollout")
    arguments = parser.parse_args()
    if arguments.step == "device":
        print(device())
    elif arguments.step == "hccl":
        print(_ranks(arguments.ranks, ["hccl-rank"])[0])
    elif arguments.step == "hccl-rank":
        print(hccl_rank())
    elif arguments.step == "engine":
        print(engine(arguments.tensor_parallel, arguments.plain, arguments.platform))
    elif arguments.step == "experts":
        print(rollout(arguments.folder, arguments.platform, arguments.ranks, arguments.exchange))
    else:
        print(rollout(arguments.folder, arguments.platform))


if __name__ == "__main__":
    main()

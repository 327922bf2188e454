"""How fast checkpoints are converted and in how much memory: beside `cp` of the same bytes, and beside mbridge.

    python benchmarks/convert.py [--gigabytes 3] [--workers 2] [--repeats 3] [--folder /a/fast/disk]

A Llama-shaped model of that size is generated. Every step runs in a process of its own, and steps take turns. Reported are
medians: wall time of the whole process (start of Python and import of torch included), its processor time, and for the
converter the time it reports itself, which leaves the start out; then the peak resident memory of one process (pages of mapped
files included), and ratios. Then both directions and `cp` take turns in one process, which gives the ratio to `cp`: of the
least times, since what disturbs a step only makes it longer.

Before each step the page cache is written back, and a virtual machine made to fetch memory (see `fetch_memory`), so that none
pays for another's bytes. A process of its own needs a second or two for its start, and by then the memory is gone again.

mbridge (PyPI) is measured if it is importable (`pip install --no-deps --target /tmp/mbridge mbridge`, PYTHONPATH=/tmp/mbridge):
it loads an HF folder into Megatron parameters and saves HF from them, in one process per rank. So the comparison is made at
TP = PP = 1, its rank file written and read by torch.save and torch.load. It gets a bare module with Megatron's parameter names,
because building its model needs TransformerEngine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from headline import Headline

#: Results that later steps read.
INPUTS = ("mg4", "mg1", "mbridge.pt")
TOOL = Path(__file__).parents[1] / "tools" / "convert_ckpt.py"


@dataclass(frozen=True)
class Measure:
    """One run.

    Args:
        seconds: wall time of the process.
        cpu_s: processor time of the process and its children.
        own_s: what the converter says it took without the start of Python; the wall time for everything else.
        peak_gib: peak resident memory of the largest process.
    """

    seconds: float
    cpu_s: float
    own_s: float
    peak_gib: float


def run(command: list[str]) -> Measure:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed.
    """
    os.sync()
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    words = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}: {words}")
    said = re.search(r" GB in ([\d.]+) s", words)
    own = float(said[1]) if said else seconds
    return Measure(seconds, usage.ru_utime + usage.ru_stime, own, usage.ru_maxrss / 2**20)


def generate(folder: Path, gigabytes: float) -> None:
    """Write a bfloat16 Llama folder of about this size, with random weights."""
    import torch

    from mindspeed_rl.checkpoint.hf import HfFolderWriter, write_config
    from mindspeed_rl.models import architecture_for

    hidden, ffn, vocab = 2048, 5632, 32000
    layer_bytes = 2 * (2.5 * hidden**2 + 3 * hidden * ffn)
    layers = max(4, 4 * round((gigabytes * 1e9 - 4 * vocab * hidden) / layer_bytes / 4))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    companions = folder.with_name("config")
    companions.mkdir()
    write_config(companions, config)
    architecture = architecture_for(config)
    # any bits but the highest exponent, which would be NaN or an infinity
    bits = torch.randint(0, 0x7F80, (vocab * hidden,), dtype=torch.int16)
    bits[::2] |= -(2**15)
    noise = bits.view(torch.bfloat16)
    with HfFolderWriter(folder, companions, max_shard_bytes=10**9) as writer:
        for op in architecture.weight_ops(architecture.read_model_config(config)):
            for name, shape in zip(op.hf, op.shapes):
                writer.add(name, noise[: torch.Size(shape).numel()].reshape(shape))


def mbridge_step(direction: str, hf: Path, rank_file: Path, out: Path) -> None:
    """What mbridge does of a conversion; runs in a process of its own."""
    import torch
    import torch.distributed as dist

    from mindspeed_rl import adaptors

    adaptors.apply("train")
    from mbridge import AutoBridge
    from megatron.core import parallel_state
    from transformers import AutoConfig

    from mindspeed_rl.models import architecture_for
    from mindspeed_rl.models.names import get_transformer_engine_name

    dist.init_process_group("gloo", init_method=f"file://{rank_file}.rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = AutoConfig.from_pretrained(hf)
    config.rope_theta = 10000.0  # transformers 5 moved it; mbridge reads the old name
    bridge = AutoBridge.from_config(config)
    raw = json.loads((hf / "config.json").read_text())
    architecture = architecture_for(raw)
    model_config = architecture.read_model_config(raw)
    model, decoder = torch.nn.Module(), torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(model_config.num_layers))
    for number, layer in enumerate(decoder.layers, 1):
        layer.layer_number = number
    model.decoder = decoder
    loaded = torch.load(rank_file, weights_only=True) if direction == "to-hf" else None
    for op in architecture.weight_ops(model_config):
        name = get_transformer_engine_name(model_config, op, op.mcore)
        value = torch.empty(op.shard_shape(), dtype=torch.bfloat16) if loaded is None else loaded[name]
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        parameter = torch.nn.Parameter(value, requires_grad=False)
        parameter.tensor_model_parallel = any(split.dim is not None for split in op.splits)
        module.register_parameter(last, parameter)
    model.config = bridge.config
    if loaded is None:
        bridge.load_weights([model], str(hf))
        torch.save(model.state_dict(), rank_file)
    else:
        bridge.safetensor_io = bridge._get_safetensor_io(str(hf))
        bridge.save_weights([model], str(out))
    dist.destroy_process_group()


def tool(*words: object) -> list[str]:
    """The converter's command line."""
    return [sys.executable, str(TOOL), *map(str, words)]


def steps(folder: Path, workers: int) -> dict[str, tuple[list[str], Path]]:
    """Command and result of every step, in an order in which each finds its input."""
    hf = folder / "hf"
    back = ("--load-model-type", "mg", "--save-model-type", "hf")
    cut = ("--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    several = ("--workers", workers)
    plan = {
        "cp": (["cp", "-r", str(hf), str(folder / "copy")], folder / "copy"),
        "hf -> mcore, TP 2 PP 2": (tool("--load-dir", hf, "--save-dir", folder / "mg4", *cut), folder / "mg4"),
        "mcore TP 2 PP 2 -> hf": (tool(*back, "--load-dir", folder / "mg4", "--save-dir", folder / "hf4"), folder / "hf4"),
        "hf -> mcore, TP 1": (tool("--load-dir", hf, "--save-dir", folder / "mg1"), folder / "mg1"),
        "mcore TP 1 -> hf": (tool(*back, "--load-dir", folder / "mg1", "--save-dir", folder / "hf1"), folder / "hf1"),
    }
    if workers > 1:
        name = f"hf -> mcore, TP 2 PP 2, {workers} workers"
        plan[name] = (tool("--load-dir", hf, "--save-dir", folder / "mgw", *cut, *several), folder / "mgw")
    if importlib.util.find_spec("mbridge"):
        step = [sys.executable, __file__, "--mbridge-step"]
        files = [str(hf), str(folder / "mbridge.pt"), str(folder / "mbridge-hf")]
        plan["mbridge: hf -> rank file"] = ([*step, "to-mcore", *files], folder / "mbridge.pt")
        plan["mbridge: rank file -> hf"] = ([*step, "to-hf", *files], folder / "mbridge-hf")
    return plan


def remove(path: Path) -> None:
    """Delete a file or folder if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def largest_gib(path: Path) -> float:
    """Size of the largest file below a path."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max(file.stat().st_size for file in files) / 2**30


def measure(folder: Path, workers: int, repeats: int) -> None:
    """Run every step in turns and print the table."""
    plan = steps(folder, workers)
    size = sum(file.stat().st_size for file in (folder / "hf").iterdir()) / 1e9
    found: dict[str, list[Measure]] = {name: [] for name in plan}
    largest: dict[str, float] = {}
    for _ in range(repeats):
        for name, (command, result) in plan.items():
            remove(result)
            fetch_memory(folder, int(size * 1.1e9))
            found[name].append(run(command))
            largest[name] = largest_gib(result)
            if result.name not in INPUTS:
                remove(result)
    for _, result in plan.values():
        remove(result)
    start = run([sys.executable, "-c", "import torch"])
    middle = {name: statistics.median(m.seconds for m in runs) for name, runs in found.items()}
    own = {name: statistics.median(m.own_s for m in runs) for name, runs in found.items()}
    peak = {name: max(m.peak_gib for m in runs) for name, runs in found.items()}
    peers = {"hf -> mcore, TP 1": "mbridge: hf -> rank file", "mcore TP 1 -> hf": "mbridge: rank file -> hf"}
    print(
        f"{size:.2f} GB of weights, median of {repeats}; `import torch` alone: {start.cpu_s:.1f} s, {start.peak_gib:.2f} GiB\n"
    )
    columns = ("step", "wall s", "GB/s", "cpu s", "without start, s", "that / cp's wall", "peak GiB", "peak / largest file")
    print("|", " | ".join((*columns, "wall: mbridge / ours")), "|")
    print("|---" * (len(columns) + 1), "|", sep="")
    for name, runs in found.items():
        cpu = statistics.median(m.cpu_s for m in runs)
        # worker processes are the fork server's children: their memory is not among what is waited for here
        memory = "| | " if "workers" in name else f"| {peak[name]:.2f} | {peak[name] / largest[name]:.2f} "
        versus = f"{middle[peers[name]] / middle[name]:.1f}" if peers.get(name) in middle else ""
        print(
            f"| {name} | {middle[name]:.1f} | {size / middle[name]:.2f} | {cpu:.1f} "
            f"| {own[name]:.1f} | {own[name] / middle['cp']:.2f} {memory}| {versus} |"
        )
    for name, peer in peers.items():
        what = f"converting {size:.1f} GB of bf16 with checksums, {name}"
        if peer in middle:
            Headline(f"{what}, s", f"{middle[name]:.1f}", "mbridge", f"{middle[peer]:.1f}", middle[peer] / middle[name]).say()
            Headline(f"{what}, GiB", f"{peak[name]:.2f}", "mbridge", f"{peak[peer]:.2f}", peak[peer] / peak[name]).say()


def fetch_memory(folder: Path, num_bytes: int) -> None:
    """Has the system take and free as much memory as the next step will fill.

    A virtual machine gives free memory back to its host, and takes much longer to fill what it must ask for again: `cp` of 2 GB
    took 0.5 s, and 5 as the third of three in a row.
    """
    throwaway = folder / "throwaway"
    with throwaway.open("wb") as file:
        block = bytes(16 << 20)
        for _ in range(0, num_bytes, len(block)):
            file.write(block)
    throwaway.unlink()


def alternate(folder: Path, repeats: int) -> None:
    """Convert both ways by turns in this process, so that neither start nor a quiet minute favours one, and print the table."""
    from mindspeed_rl.cli.convert import main as convert

    hf = folder / "hf"
    size = sum(file.stat().st_size for file in hf.iterdir()) / 1e9
    cuts = {"TP 1": (), "TP 2 PP 2": ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")}
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for cut, words in cuts.items():
            mcore, back = folder / "mcore", folder / "back"
            for name, command in {
                f"cp ({cut})": None,
                f"hf -> mcore, {cut}": ["--load-dir", str(hf), "--save-dir", str(mcore), *words],
                f"mcore {cut} -> hf": ["--load-dir", str(mcore), "--save-model-type", "hf", "--save-dir", str(back)],
            }.items():
                os.sync()
                fetch_memory(folder, int(size * 1.1e9))
                start, own = time.perf_counter(), time.process_time()
                if command is None:
                    subprocess.run(["cp", "-r", hf, folder / "copy"], check=True)
                elif convert(command):
                    raise RuntimeError(f"{name} failed")
                wall.setdefault(name, []).append(time.perf_counter() - start)
                cpu.setdefault(name, []).append(time.process_time() - own)
            for made in ("mcore", "back", "copy"):
                remove(folder / made)
    print(f"{size:.2f} GB of weights, {repeats} turns after one that is not counted\n")
    print("| step | wall s, least | median | most | GB/s, median | cpu s, median |\n|---|---|---|---|---|---|")
    for name, seconds in wall.items():
        times, own = sorted(seconds[1:]), statistics.median(cpu[name][1:])
        middle = statistics.median(times)
        shown = "" if name.startswith("cp") else f"{own:.2f}"
        print(f"| {name} | {times[0]:.2f} | {middle:.2f} | {times[-1]:.2f} | {size / middle:.2f} | {shown} |")
    copy = min(wall["cp (TP 1)"][1:])
    for name in ("hf -> mcore, TP 1", "mcore TP 1 -> hf"):
        least = min(wall[name][1:])
        what = f"converting {size:.1f} GB of bf16 with checksums, {name}, GB/s in the best of {repeats} turns"
        Headline(what, f"{size / least:.2f}", "`cp`", f"{size / copy:.2f}", copy / least).say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alternate", action="store_true", help="only both directions, by turns in one process")
    parser.add_argument("--folder", type=Path, help="where to write; default the system's temporary folder")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mbridge-step", nargs=4, metavar=("DIRECTION", "HF", "RANK_FILE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mbridge_step:
        direction, *paths = args.mbridge_step
        mbridge_step(direction, *map(Path, paths))
        return
    if args.generate:
        generate(args.generate, args.gigabytes)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        # in a process of its own: a child's peak memory counts from the memory of the process that starts it
        run([sys.executable, __file__, "--gigabytes", str(args.gigabytes), "--generate", str(Path(name) / "hf")])
        if not args.alternate:
            measure(Path(name), args.workers, args.repeats)
            print()
        alternate(Path(name), args.repeats)


if __name__ == "__main__":
    main()

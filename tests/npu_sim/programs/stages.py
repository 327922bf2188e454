"""A supervised stage's own run file, in one process: on the simulated NPU with MindSpeed, or on the CPU.

Settings: mode ("cpu" or "mindspeed"), folder (the quickstart's files), stage, keys (further overrides), steps; without a stage
it writes the quickstart's files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ranks import rank_settings, report

ROOT = Path(__file__).parents[3]
#: data -> the preprocessing that makes it
KINDS = {
    "sft": ["--prompt-type", "hf", "--handler-name", "AlpacaStyleInstructionHandler"],
    "pairs": ["--prompt-type", "hf", "--handler-name", "AlpacaStylePairwiseHandler"],
    "documents": ["--handler-name", "GeneralPretrainHandler", "--json-keys", "text", "--append-eod"],
    "steps": ["--handler-name", "AlpacaStyleProcessRewardHandler", "--placeholder-token", "#", "--reward-tokens", "y", "n"],
}


def write_files(folder: Path) -> None:
    """A random model and data for every stage, written by the scripts that users run."""
    from scripts import load_script

    from mindspeed_rl.cli import preprocess

    for name in ("make_task", "make_stage_data"):
        load_script(f"examples/quickstart/{name}.py").main(folder)
    (folder / "data").mkdir()
    common = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder / "model"), "--workers", "1"]
    for name, options in KINDS.items():
        files = ["--input", str(folder / "raw" / f"{name}.jsonl"), "--output-prefix", str(folder / "data" / name)]
        assert preprocess.main([*common, *files, *options]) == 0


def main() -> None:
    """The losses and gradient norms of some steps."""
    settings = rank_settings()
    on_cpu, folder = settings["mode"] == "cpu", Path(settings["folder"])
    if not on_cpu and "NPU_SIM_DEVICES" in os.environ:
        import mindspeed_operators
        import simulator

        simulator.install()
        sys.path.insert(0, os.environ["MINDSPEED_SRC"])
        mindspeed_operators.install()
    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.config import load_run_config
    from mindspeed_rl.run.resolve import resolve

    name = "cpu" if on_cpu else "npu"
    platform.select(name)
    adaptors.apply("train")
    if "stage" not in settings:
        write_files(folder)
        report([])
    os.chdir(ROOT)
    shipped = load_run_config(settings["file"]).megatron_training
    keys = {
        "load": folder / "model",
        "tokenizer_name_or_path": folder / "model",
        "data_path": str(shipped.data_path).replace("./runs/quickstart", str(folder)).replace("'", ""),
        "save": "null",
        "num_npus": 1,
        "tensor_model_parallel_size": 1,
        "train_iters": 4,
        "stage": settings["stage"],
        **settings.get("keys", {}),
    }
    overrides = [f"platform={name}", *(f"megatron_training.{key}={value}" for key, value in keys.items())]
    run = resolve(load_run_config(settings["file"], None, overrides), platform=name)
    adaptors.configure(run.config.actor_config)
    from mindspeed_rl.run.models import plan_models
    from mindspeed_rl.workers.supervised_worker import SupervisedWorker

    worker = SupervisedWorker(plan_models(run), rank=0)
    steps = [worker.train().metrics.results() for _ in range(settings["steps"])]
    report([[step["train/loss"], step["train/grad_norm"]] for step in steps])


if __name__ == "__main__":
    main()

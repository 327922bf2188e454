"""Jobs of tests/dist, which train on the CPU there, on the simulated NPU or on the CPU.

Settings: mode ("cpu" or "mindspeed"), job (module and function), setting (of `training_jobs.Setting`), arguments of the job,
weights (the file to which the first rank writes what the job returns of them).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ranks import rank_settings, report

DIST = Path(__file__).parents[2] / "dist"


def main() -> None:
    """Reports what the job returns, without its weights and gradients; metrics as numbers."""
    settings = rank_settings()
    on_cpu = settings["mode"] == "cpu"
    if not on_cpu and "NPU_SIM_DEVICES" in os.environ:
        import mindspeed_operators
        import simulator

        simulator.install()
        sys.path.insert(0, os.environ["MINDSPEED_SRC"])
        mindspeed_operators.install()
    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.config import MegatronConfig

    os.environ["TEST_PLATFORM"] = "cpu" if on_cpu else "npu"
    platform.select(os.environ["TEST_PLATFORM"])
    adaptors.apply("train")
    sys.path.append(str(DIST))
    setting = settings["setting"]
    shape = json.loads(Path(setting["folder"], "config.json").read_text())
    sizes = {"num_attention_heads": shape["num_attention_heads"], "num_layers": shape["num_hidden_layers"]}
    module, _, function = settings["job"].partition(":")
    adaptors.configure(MegatronConfig(**sizes | {"lr": 1e-3, "bf16": False} | setting["keys"]))
    platform.current().set_device(int(os.environ["LOCAL_RANK"]))
    jobs, training = importlib.import_module(module), importlib.import_module("training_jobs")
    result: dict[str, Any] = getattr(jobs, function)(setting=training.Setting(**setting), **settings.get("arguments", {}))
    if result["weights"] is not None:
        from safetensors.numpy import save_file

        save_file(result["weights"], settings["weights"])
    result["metrics"] = [metrics.results() for metrics in result["metrics"]]
    report({name: value for name, value in result.items() if name not in ("weights", "gradients")})


if __name__ == "__main__":
    main()

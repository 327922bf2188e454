"""Write what one process computes on one kind of device: python tests/dist/one_device.py PLATFORM MODELS FILE

Runs jobs of the other tests of this folder for the models that `save_models` put into the folder MODELS and writes their
figures to FILE, with the reason instead of figures where a job raised. test_one_gpu.py compares what two kinds of devices
write.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

#: dense, experts, latent attention, gated delta net, sinks and windows, norms and windows
FAMILIES = ("qwen2", "qwen3_moe", "deepseek_v3", "qwen3_5", "gpt_oss", "gemma3")
_BF16 = ("qwen2", "qwen3_5")


def save_models(folder: Path) -> None:
    """Write the models, so that other releases of transformers read the same weights."""
    import tiny_families

    for name in FAMILIES:
        tiny_families.save(name, folder / name)


def _two_numbers(value: np.ndarray) -> list[float]:
    """The norm, and a product with fixed random numbers, which shows what the norm does not: signs and places."""
    return [float(np.linalg.norm(value)), float(value @ np.random.default_rng(len(value)).standard_normal(len(value)))]


def _figures(models: Path) -> dict[str, Any]:
    import policy_jobs
    import training_jobs
    from ports import find_free_port
    from training_jobs import Setting

    jobs = {f"train {name}": (training_jobs.train, Setting(str(models / name))) for name in FAMILIES}
    jobs |= {f"train {name} bf16": (training_jobs.train, Setting(str(models / name), {"bf16": True})) for name in _BF16}
    jobs |= {f"update {name}": (policy_jobs.update, Setting(str(models / name))) for name in ("qwen2", "qwen3_5")}
    results: dict[str, Any] = {}
    for title, (job, setting) in jobs.items():
        start = time.monotonic()
        os.environ["MASTER_PORT"] = str(find_free_port())  # a world of its own
        try:
            report = job(setting)
        except Exception:  # noqa: BLE001  (one job less; the comparison shows it)
            results[title] = traceback.format_exc()
        else:
            weights = {name: _two_numbers(value.ravel()) for name, value in report["weights"].items()}
            metrics = [{name: metric.value for name, metric in step.items()} for step in report["metrics"]]
            results[title] = {"metrics": metrics, "grad_norm": report["grad_norm"], "weights": weights}
        print(f"{title}: {time.monotonic() - start:.1f} s, {str(results[title])[-300:]}", flush=True)
    return results


def main() -> None:
    kind, models, file = sys.argv[1:]
    os.environ.update(TEST_PLATFORM=kind, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    Path(file).write_text(json.dumps(_figures(Path(models)), default=float))


if __name__ == "__main__":
    main()

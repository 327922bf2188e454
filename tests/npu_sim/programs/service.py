"""Training as a service on the simulated NPU: calls of one client, compared with transformers and peft, and with themselves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from ranks import rank_settings, report

sys.path.append(str(Path(__file__).parents[2] / "dist"))


def main() -> None:
    """Settings: folder (has model/)."""
    folder = Path(rank_settings()["folder"])
    from service_program import check_numbers, check_sampling, check_state, run_config

    from mindspeed_rl.service.local_backend import LocalBackend

    for name in ("peft", "states"):
        (folder / name).mkdir()
    keys = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    # vllm-ascend's kernels of adapters up to rank 64 take bfloat16, which has no digits to compare
    serve = {"num_models": 3, "num_engine_adapters": 2, "sampler_ema_decay": 0.5}
    backend = LocalBackend.open(run_config(str(folder / "model"), "npu", lora_r=128, serve=serve, **keys))

    async def check() -> dict[str, Any]:
        return {
            "numbers": await check_numbers(backend, folder / "model", folder / "peft"),
            "state": await check_state(backend, folder / "states"),
            "sampling": await check_sampling(backend),
        }

    report(asyncio.run(check()))


if __name__ == "__main__":
    main()

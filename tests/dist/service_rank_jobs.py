"""Ranks of a training service, called in step as the server calls them: passes, folders and samples of two engines."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from service_program import ADAM, draw, supervised
from service_ranks_program import SPECS, tree

from mindspeed_rl import adaptors
from mindspeed_rl.config import build_run_config
from mindspeed_rl.platform.environment import EXACT_VARIABLE, HEAD_ADAPTERS_VARIABLE
from mindspeed_rl.service.backend import AdapterSpec, LossCall, PassCall, SampleCall


def serve(folder: str, work: Path, tensor: int, data: int) -> dict[str, Any]:
    """What this rank returns of the calls; results of samples only where it returns those of its engine."""
    os.environ.update({EXACT_VARIABLE: str(tensor), HEAD_ADAPTERS_VARIABLE: "1"})
    importlib.import_module("mindspeed_rl.adaptors.vllm_head_adapters").apply()
    for scope in ("train", "rollout"):
        adaptors.apply(scope)
    models = importlib.import_module("mindspeed_rl.run.models")
    run = models.plan_models(models.resolve_run(build_run_config(tree(folder, work, tensor, data)), 1))
    worker = importlib.import_module("mindspeed_rl.service.rank_worker").RankWorker(
        run, "service-test", rank=int(os.environ["RANK"])
    )

    def call(method: str, *arguments: Any, **keywords: Any) -> Any:
        kind, value = worker.call_tenants(method, arguments, keywords)
        assert kind == "done", (method, kind, value)
        return value

    seen: dict[str, Any] = {"numbers": []}
    for name, spec in SPECS.items():
        call("create_model", name, spec)
    for step in range(2):
        for rows, loss in (([9, 5, 12], "ppo"), ([7], "cross_entropy")):
            make = draw if loss == "ppo" else supervised
            calls = [PassCall(n, [make(100 * step + ord(n) + k, k) for k in rows], LossCall(loss)) for n in SPECS]
            for result in call("run_passes", calls) or ():
                seen["numbers"] += [result.metrics["loss:sum"], *(float(v) for o in result.outputs for v in o["logprobs"])]
        for name in SPECS:
            metrics = call("optim_step", name, ADAM)
            seen["numbers"] += [] if metrics is None else [metrics["grad_norm:mean"]]
    seen["joined"] = call("num_joined_passes")
    call("save_state", "a", work / "a", with_optimizer=True)
    call("export_merged", "a", work / "merged")
    seen["refused"] = [
        worker.call_tenants("create_model", ("a", AdapterSpec(4)), {}),
        worker.call_tenants("save_state", ("a", work / "a"), {"with_optimizer": True}),
        worker.call_tenants("load_state", ("z", work / "z"), {"with_optimizer": True}),
    ]
    call("load_state", "again", work / "a", with_optimizer=True)
    num_replicas = worker._tenants.num_replicas
    names, results = {}, {}
    for source in ("a", work / "a", "again", None):
        worker.call_tenants("make_sampler", (source,), {})
    for index in range(8):
        prompt = SampleCall(np.arange(5, 9 + index // 4).tolist(), max_tokens=6, temperature=0.0, ends_at_eos=False)
        kind, name = worker.call_tenants("start_sampling", (f"sampler-{index % 4}", prompt, index % num_replicas), {})
        assert kind == "done"
        names[f"call-{index}"] = index
    for _ in range(40):
        outcome, ended = worker.step_tenants(4)
        assert outcome[0] == "done", outcome
        results |= {names[name]: [(sample.tokens, sample.log_probs) for sample in result.samples] for name, result in ended}
    seen["samples"] = results
    for index in range(4):
        call("drop_sampler", f"sampler-{index}")
    call("close")
    return seen

# ruff: noqa: E402  (Megatron and vLLM must be imported after the adaptors)
"""Jobs that hold a vLLM engine beside the training engine; the world and the engine outlive a job, the layout does not."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from training_jobs import KEYS, Setting, all_rows, my_rows, summary  # applies the adaptor, before Megatron is imported

from mindspeed_rl import adaptors
from mindspeed_rl.adaptors import vllm_cpu_linear, vllm_drafts
from mindspeed_rl.adaptors.engine_hooks import DERIVED

adaptors.apply("rollout")  # before vLLM is imported

# isort: split
from megatron.core import parallel_state

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PendingMetrics, masked_mean
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.quantization import quantize_side, stored_dtypes
from mindspeed_rl.resharding.transfer import WeightSource
from mindspeed_rl.rollout.module_engine import ModuleEngine
from mindspeed_rl.rollout.requests import Completion, Sampling, sample_seed
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine
from mindspeed_rl.workers.engines import PassSettings, build_engine
from mindspeed_rl.workers.rollout_replica import _build_routing_arguments

TEMPERATURE = 0.9

_engines: dict[str, Any] = {}


@dataclass
class Pair:
    """A training engine and the rollout engine that it feeds."""

    engine: TrainEngine
    stream: WeightSource
    rollout: Any  # of either kind
    infer_tp: int
    delta: bool = False
    quantization: str | None = None
    dtype: torch.dtype = torch.float32
    version: int = -1
    _push: WeightPush | None = None

    def push(self) -> None:
        """The rollout engine holds the trained weights; not yet proven."""
        self.version += 1
        self.rollout.load_weights(self._write, self.version)

    def _write(self, model: Any) -> None:
        if self._push is None:
            trained = self.stream.with_predictions if self.rollout.syncs_drafts else self.stream.trained
            trained = trained if self.quantization is None else quantize_side(trained, self.quantization)
            load, stored = model.load_weights, stored_dtypes(trained.quantized, trained.quantization)
            result = read_destinations(model, load, trained.shapes, self.dtype, skip=DERIVED, stored=stored)
            layout = self.rollout.layout
            replica = dist.get_rank() // (layout.tensor * layout.sharing)
            self._push = WeightPush(
                trained,
                result,
                Exchange.from_world(),
                replica=replica,
                derived=DERIVED,
                delta=self.delta,
            )
        self._push.write(model)

    def prove(self) -> int:
        """The number of engine parameters that were compared."""
        assert self._push is not None
        model = self.rollout.get_model()
        return self._push.prove(model, self.rollout.hooks.unpack(model)).num_parameters

    def generate(self, iteration: int = 0) -> list[Completion]:
        """Two responses to each of the eight prompts, the same on every rank."""
        if isinstance(self.rollout, VllmEngine):
            return self.rollout.generate(requests_of(iteration))
        for index, request in enumerate(requests_of(iteration)):
            self.rollout.add_request(str(index), request.prompt_ids, self.rollout.sampling, request.seed)
        ended: dict[str, Completion] = {}
        while self.rollout.has_unfinished():
            ended.update(self.rollout.step())
        return [ended[str(index)] for index in range(16)]


def requests_of(iteration: int) -> list[GenerationRequest]:
    """Two requests for each of the eight prompts."""
    rows = all_rows()
    prompts = [ids[:length].tolist() for ids, length in zip(rows.input_ids, rows.prompt_lengths)]
    return [GenerationRequest(prompts[i // 2], sample_seed(1, iteration, i // 2, i % 2)) for i in range(16)]


def sampled_rows(completions: list[Completion]) -> Rows:
    """Prompts with their responses, rollout log-probs, and alternating advantages."""
    rows = all_rows()
    prompts = [ids[:length] for ids, length in zip(rows.input_ids, rows.prompt_lengths)]
    return Rows(
        input_ids=[torch.cat([prompts[i // 2], torch.tensor(c.token_ids)]) for i, c in enumerate(completions)],
        prompt_lengths=[rows.prompt_lengths[i // 2] for i in range(16)],
        columns={
            "rollout_log_probs": [torch.tensor(c.log_probs) for c in completions],
            "advantage": [torch.tensor(1.0 - 2.0 * (i % 2)) for i in range(16)],
        },
    )


def policy_gradient(inputs: LossInputs) -> LossOutput:
    """-(ratio x advantage) against the rollout's log-probs."""
    columns, mask = inputs.columns, inputs.mask
    per_token = -(inputs.outputs[0] - columns["rollout_log_probs"]).exp() * columns["advantage"][:, None]
    return LossOutput((per_token * mask).sum(), mask.sum(), PendingMetrics({"loss": masked_mean(per_token, mask)}))


def _rollout_of(
    folder: str,
    infer_tp: int,
    sharing: int | None,
    routed: bool,
    drafts: bool,
    dtype: str,
    kind: str = "vllm",
    trusts_code: bool = False,
) -> Any:
    if kind == "transformers":
        sizes = {"infer_tensor_parallel_size": 1, "max_num_seqs": 16, "max_model_len": 64}
        config = GenerateConfig(**sizes, dtype=dtype, trust_remote_code=trusts_code)
        return ModuleEngine(folder, config, Sampling(TEMPERATURE, 8, (1,)), world_size=dist.get_world_size())
    key = f"{folder} drafts" if drafts else folder
    if key not in _engines:
        config = GenerateConfig(
            infer_tensor_parallel_size=infer_tp,
            infer_expert_parallel_size=sharing or 1,
            enable_expert_parallel=sharing is not None,
            max_num_seqs=16,
            max_model_len=512 if routed else 64,
            max_num_batched_tokens=2048 if routed else 256,
            enable_prefix_caching=routed,
            dtype=dtype,
            kv_cache_memory_gib=0.03,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1} if drafts else None,
        )
        run_id = f"test-{_shared_number()}"
        _engines[key] = VllmEngine(
            folder,
            config,
            Sampling(TEMPERATURE, 8, (1,)),
            run_id=run_id,
            kv_bytes_per_token=4096,
            engine_arguments=_build_routing_arguments("router_replay.mode") if routed else None,
        )
        _engines[key].syncs_drafts = drafts
    return _engines[key]


def _shared_number() -> int:
    """The process id of rank 0, on every rank."""
    tensor_slice = [os.getpid()]
    dist.broadcast_object_list(tensor_slice, src=0)
    return tensor_slice[0]


@contextlib.contextmanager
def pair_of(
    setting: Setting,
    infer_tp: int,
    sharing: int | None = None,
    *,
    routed: bool = False,
    drafts: bool = False,
    kind: str = "vllm",
) -> Iterator[Pair]:
    """A fresh training engine of this layout beside the rollout engine of this process; collective.

    Args:
        sharing: replicas that share experts, with expert parallelism; None without.
        routed: the rollout engine says where it sent tokens; it has room for long prompts and keeps them.
        drafts: multi-token-prediction layers make drafts in it.
        kind: value of `generate_config.engine`.
    """
    config = MegatronConfig(**KEYS | {"lr": 2e-3, "lr_warmup_iters": 0} | setting.keys)
    parallel.init_process_group(parallel.RankInfo.from_env(), 120)
    plan = plan_model(config, setting.folder)
    parallel._init_model_parallel(config, plan.layout.vpp, 120)
    try:
        parallel._seed_all(1)
        passes = PassSettings(packed=setting.packed, pad_id=0, temperature=TEMPERATURE)
        built = build_engine(config, plan, Path(setting.folder), passes, trains=True)
        engine: Any = built.engine
        engine.load(HfFolder(setting.folder))
        engine.start_training(1)
        stream = built.build_stream()
        stream.trained = replace(stream.trained, bucket_bytes=1 << 16)
        dtype = "bfloat16" if config.bf16 else "float32"
        rollout = _rollout_of(setting.folder, infer_tp, sharing, routed, drafts, dtype, kind, config.trust_remote_code)
        yield Pair(engine, stream, rollout, infer_tp, dtype=getattr(torch, dtype))
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        gc.collect()


def differences(pair: Pair, rows: Rows, setting: Setting) -> torch.Tensor:
    """Between the trainer's and the rollout's log-probs of the same tokens, on this rank."""
    mine = my_rows(rows)
    output = pair.engine.forward(mine, setting.batching)
    if output is None:
        return torch.zeros(1)
    return torch.cat([(a - b).abs() for a, b in zip(output[0], mine.columns["rollout_log_probs"])])


def largest_difference(pair: Pair, rows: Rows, setting: Setting) -> float:
    """The largest of `differences`."""
    return differences(pair, rows, setting).max().item()


def learn(setting: Setting, infer_tp: int, updates: int = 2, sharing: int | None = None, kind: str = "vllm") -> dict[str, Any]:
    """Pushes, proves, generates, compares log-probs and makes a step, several times over."""
    report: dict[str, Any] = {"proven": [], "tokens": [], "differences": [], "medians": []}
    results = []
    with pair_of(setting, infer_tp, sharing, kind=kind) as pair:
        for iteration in range(updates + 1):
            pair.push()
            report["proven"].append(pair.prove())
            completions = pair.generate(iteration)
            rows = sampled_rows(completions)
            report["tokens"].append([completion.token_ids for completion in completions])
            difference = differences(pair, rows, setting)
            report["differences"].append(difference.max().item())
            report["medians"].append(difference.median().item())
            if iteration < updates:
                results.append(pair.engine.train_step(my_rows(rows), setting.batching, policy_gradient))
        return report | summary(results, {})


def learn_packed(setting: Setting, infer_tp: int) -> dict[str, Any]:
    """As `learn`, with every linear layer of the engine packed; beside it the bytes of packed copies."""
    report: dict[str, Any] = {"differences": [], "after push": [], "after generating": []}
    with mock.patch.object(vllm_cpu_linear, "PACKED_ELEMENTS", 1):
        with pair_of(setting, infer_tp) as pair:
            for iteration in range(3):
                pair.push()
                pair.prove()
                report["after push"].append(pair.rollout.resident_bytes()["packed weights"])
                rows = sampled_rows(pair.generate(iteration))
                report["after generating"].append(pair.rollout.resident_bytes()["packed weights"])
                report["differences"].append(largest_difference(pair, rows, setting))
                pair.engine.train_step(my_rows(rows), setting.batching, policy_gradient)
            pair.rollout.release_memory()
            report["after release"] = pair.rollout.resident_bytes()["packed weights"]
            pair.rollout.restore_memory("weights")
            pair.rollout.restore_memory("cache")
    return report


def misdeliver(setting: Setting, infer_tp: int) -> dict[str, str]:
    """What the proof says of weights that were not delivered as trained; this rank damages its own engine."""
    said = {}
    with pair_of(setting, infer_tp) as pair:
        pair.push()
        pair.prove()

        def attempt(kind: str) -> None:
            try:
                pair.prove()
                said[kind] = "nothing"
            except WeightDeliveryError as error:
                said[kind] = str(error)
            dist.barrier()

        parameters = dict(pair.rollout.get_model().named_parameters())
        name = next(name for name in parameters if "layers.1" in name and "o_proj" in name)
        with torch.no_grad():
            parameters[name].view(-1)[3] += 1e-3
        attempt("damaged")
        pair.push()
        attempt("mended")
        pair.engine.train_step(my_rows(sampled_rows(pair.generate())), setting.batching, policy_gradient)
        attempt("stale")
        pair.push()
        attempt("pushed again")
    return said


def rest(setting: Setting, infer_tp: int) -> dict[str, Any]:
    """The same requests before and after the engine's memory was away, with NaN left behind in the heap."""
    with pair_of(setting, infer_tp) as pair:
        pair.push()
        first = pair.generate()
        again = pair.generate()
        rested = []
        for _ in range(10):
            pair.rollout.release_memory()
            junk = [torch.full((1 << 16,), float("nan")) for _ in range(40)]
            del junk
            pair.rollout.restore_memory("weights")
            pair.rollout.restore_memory("cache")
            rested.append(pair.generate())
        state = torch.get_rng_state()
        pair.generate()
        return {
            "tokens": [completion.token_ids for completion in first],
            "repeats": again == first,
            "rested": [completions == first for completions in rested],
            "draws nothing": torch.equal(torch.get_rng_state(), state),
        }


def share_out(setting: Setting, infer_tp: int, sharing: int | None, cuts: list[list[int]]) -> list[dict[int, Any]]:
    """Responses by number of the request, of only this rank's replica: of each push, those that fall to it.

    Args:
        cuts: for each push, how many of the sixteen requests each replica takes, in order; the engine rests between pushes.
    """
    results: list[dict[int, Any]] = []
    with pair_of(setting, infer_tp, sharing) as pair:
        replica = pair.rollout.layout.replica(dist.get_rank())
        for iteration, counts in enumerate(cuts):
            pair.push()
            pair.prove()
            first = sum(counts[:replica])
            mine = list(range(first, first + counts[replica]))
            requests = requests_of(iteration)
            completions = pair.rollout.generate([requests[number] for number in mine])
            results.append({number: completion.token_ids for number, completion in zip(mine, completions)})
            pair.rollout.release_memory()
            pair.rollout.restore_memory("weights")
            pair.rollout.restore_memory("cache")
            with torch.no_grad():  # what an update would do: other weights for the next push, alike on every layout
                for weight in pair.stream.local_weights.values():
                    weight.tensor.mul_(1.05)
    return results


def misplace_experts(setting: Setting, infer_tp: int, sharing: int | None) -> dict[str, str]:
    """What the proof says when one rank of an expert group has lost an update of its experts, and after the next push."""
    said = {}
    with pair_of(setting, infer_tp, sharing) as pair:
        for kind in ("damaged", "mended"):
            pair.push()
            parameters = dict(pair.rollout.get_model().named_parameters())
            name = next(name for name in parameters if name.endswith("w13_weight"))
            if kind == "damaged" and dist.get_rank() == dist.get_world_size() - 1:
                with torch.no_grad():
                    parameters[name].view(-1)[3] += 1e-3
            try:
                pair.prove()
                said[kind] = "nothing"
            except WeightDeliveryError as error:
                said[kind] = str(error)
            dist.barrier()
    return said


def learn_with_drafts(setting: Setting, drafts: bool) -> dict[str, Any]:
    """Trains the tokens that it samples; reports what was proven, tokens, differences of log-probs and accepted drafts."""
    report: dict[str, Any] = {"proven": [], "tokens": [], "differences": [], "drafts": []}
    with pair_of(setting, 1, drafts=drafts) as pair:
        parameters = dict(pair.engine.model.models[0].named_parameters())
        report["added"] = parameters["mtp.layers.0.eh_proj.weight"].detach().float().clone()
        for iteration in range(3):
            pair.push()
            report["proven"].append(pair.prove())
            vllm_drafts.counts.take()
            completions = pair.generate(0)
            report["drafts"].append(vllm_drafts.counts.take())
            rows = sampled_rows(completions)
            report["tokens"].append([completion.token_ids for completion in completions])
            report["differences"].append(largest_difference(pair, rows, setting))
            for _ in range(20 if iteration < 2 else 0):
                pair.engine.train_step(my_rows(rows), setting.batching, policy_gradient)
        changed = parameters["mtp.layers.0.eh_proj.weight"].detach().float() - report.pop("added")
        report["changed"] = float(changed.abs().max())
        if drafts:
            held = dict(pair.rollout.get_model().named_parameters())
            name = next(name for name in held if name.endswith("eh_proj.weight"))
            report["is_trained"] = bool(torch.equal(held[name], parameters["mtp.layers.0.eh_proj.weight"]))
        return report

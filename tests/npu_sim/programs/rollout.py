"""vllm-ascend as the rollout engine on the simulated NPU: build, push, generate, sleep and wake up twice, new weights.

Every drawn token's log-prob is computed once more by transformers on the CPU, which knows nothing of vLLM.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from engine import MODELS
from quantized_reference import (
    Noise,
    OtherTorch,
    QuantizedSync,
    Sides,
    quantize_float32,
    quantize_reference,
    return_float32,
    split_experts,
)
from ranks import rank_settings, report

PROMPTS = ([11, 12, 13, 14, 15], [40, 41], [7] * 20, [100, 3, 9, 77, 5, 61, 33])
NEW_TOKENS = 8
#: names of what the last push changes
MLPS = r"\.mlp\.|\.block_sparse_moe\."


def keep_float32() -> None:
    """Latent attention and gated delta nets compute prompts in float32 where the model is in it.

    vllm-ascend casts the first to bfloat16 and back, and refuses float32 in the second, because the device's operators take
    nothing wider. The simulated ones do, and behind the cast nothing can be compared more closely than to two digits.
    """
    from vllm_ascend.attention import mla_v1
    from vllm_ascend.ops.triton.fla import chunk

    mla_v1.torch = OtherTorch(bfloat16=torch.float32)
    # float32, which it refuses, is float64 to it
    chunk.torch = OtherTorch(bfloat16=torch.float32, float32=torch.float64)


def decode(reference: Any, prompt: list[int], sampling: Any, end: int) -> list[int]:
    """Greedy tokens by transformers' logits, token by token.

    The logit x of a token of prompt or response is x / p where it is positive, and x p where it is negative, p the repetition
    penalty: arXiv:1909.05858.
    """
    tokens: list[int] = []
    while len(tokens) < NEW_TOKENS and (sampling.ignore_eos or tokens[-1:] != [end]):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, -1].tolist()
        for token in {*prompt, *tokens}:
            logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        tokens.append(max(range(len(logits)), key=logits.__getitem__))
    return tokens


def count_decode(engine: Any, requests: int) -> list[int]:
    """Kernels and waits of one more token of each of so many responses."""
    from mindspeed_rl.platform.cost_ledger import CostLedger
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import GenerationRequest

    batch = [GenerationRequest(list(PROMPTS[index % len(PROMPTS)]), 100 + index) for index in range(requests)]
    totals = []
    for tokens in (4, 4, 6):  # the first one makes what later ones use
        with CostLedger() as ledger:
            engine.generate(batch, Sampling(1.0, tokens, ()))
        totals.append([sum(ledger.kernels.values()), sum(ledger.waits.values())])
    return [(more - few) // 2 for few, more in zip(*totals[1:])]


#: relative error of a number in bfloat16, and draws of errors
BF16_ROUNDING, DRAWS = 2.0**-9, 16


def compare_disturbed(engine: Any, requests: list[Any], prompts: list[list[int]], reference: Any) -> dict[str, Any]:
    """Return how far log-probs of an engine in bfloat16 are from the definition, and how far bfloat16 moves the definition.

    Returns:
        "plain" and "cut" (a temperature of 0.7, `min_p`) -> of each token both, the second as the largest of some draws.
    """
    from mindspeed_rl.rollout.requests import Sampling

    noise, results = Noise(reference), {}
    for name, sampling in (("plain", Sampling(1.0, NEW_TOKENS, (1,))), ("cut", Sampling(0.7, NEW_TOKENS, (1,), min_p=0.05))):
        results[name] = []
        for prompt, completion in zip(prompts, engine.generate(requests, sampling)):
            row, columns = torch.tensor([[*prompt, *completion.token_ids]]), torch.tensor(completion.token_ids)[:, None]
            found = []
            for draw in range(1 + DRAWS):
                torch.manual_seed(draw)
                noise.size = BF16_ROUNDING if draw else 0.0
                with torch.no_grad():
                    logits = reference(row).logits[0, len(prompt) - 1 : -1].float()
                found.append((logits / sampling.temperature).log_softmax(-1).gather(1, columns)[:, 0])
            noise.size = 0.0
            gaps = (found[0] - torch.tensor(completion.log_probs)).abs()
            moved = (torch.stack(found[1:]) - found[0]).abs().amax(0)
            results[name] += torch.stack([gaps, moved], 1).tolist()
    return results


def main() -> None:
    """Ranks of one replica, or of replicas that share experts, and what each of them reports.

    Settings: model or family (of `tiny_families`, with other sizes), dtype, tensor_parallel, rounds of sleep, drafts
    (`speculative_config`), cast_prompts (True as it is), generate (further keys of generate_config), sharing (replicas that
    share experts; without it each has all of them), prompts (of each rank, the numbers of those it answers), experts_of_devices
    (of each layer; for `expert_map_path`), routing (whether the experts of each token are reported), sampling (several groups
    of keys of sampling_config, for greedy responses), delta (syncs of quantized weights write what changed), seed of weights,
    counts (False without the kernels of a token), disturbed (the reference with errors of bfloat16 too), longest (tokens of the
    first prompt in place of its own), tower (False: syncs send no weights of a model's tower).
    """
    settings = rank_settings()
    rank = int(os.environ["RANK"])
    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.config import GenerateConfig, SamplingConfig
    from mindspeed_rl.platform.environment import EXPERTS_EXCHANGE_VARIABLE

    if exchange := settings.get("generate", {}).get("infer_moe_token_dispatcher_type"):  # as the driver sets it for workers
        os.environ[EXPERTS_EXCHANGE_VARIABLE] = exchange
    device = platform.select("npu")
    adaptors.apply("rollout")
    device.set_device(rank)
    from scripts import ROOT
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from vllm.compilation.counter import compilation_counter

    from mindspeed_rl.adaptors.engine_hooks import DERIVED
    from mindspeed_rl.config.expert_map import write_expert_map
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine
    from mindspeed_rl.workers.responses import build_sampling

    torch_dtype = getattr(torch, settings.get("dtype", "bfloat16"))
    folder = Path(os.environ["NPU_SIM_REPORT_DIR"], f"model{rank}")
    folder.mkdir()
    if "family" in settings:
        sys.path.append(str(ROOT / "tests" / "dist"))
        import tiny_families

        shape = tiny_families._CONFIGS[settings["family"]]()
        for key, value in settings.get("sizes", {}).items():
            setattr(shape, key, value)
    else:
        (folder / "config.json").write_text(json.dumps(MODELS[settings.get("model", "qwen2")]))
        shape = AutoConfig.from_pretrained(folder)
    torch.manual_seed(settings.get("seed", 5))
    kind = AutoModelForImageTextToText if hasattr(shape, "vision_config") else AutoModelForCausalLM
    reference = kind.from_config(shape, dtype=torch.float32)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(torch_dtype) * 4)  # far from uniform, and equal on both sides
    reference.save_pretrained(folder / "weights")  # in a process group, only rank 0 would write
    if "family" in settings:  # with the keys of published models
        (folder / "config.json").write_text((folder / "weights" / "config.json").read_text())
    dist.init_process_group("hccl")
    tp = settings.get("tensor_parallel", 1)
    config = GenerateConfig(
        infer_tensor_parallel_size=tp,
        infer_expert_parallel_size=settings.get("sharing", 1),
        enable_expert_parallel="sharing" in settings,
        max_num_seqs=8,
        max_model_len=64,
        max_num_batched_tokens=256,
        dtype=settings.get("dtype", "bfloat16"),
        gpu_memory_utilization=0.05,
        enforce_eager=True,
        speculative_config=settings.get("drafts"),
        quantization=settings.get("quantization"),
    )
    config = dataclasses.replace(config, **settings.get("generate", {}))
    if config.expert_map_path is not None:
        path = folder / config.expert_map_path
        path.write_text(write_expert_map(settings["experts_of_devices"]))
        config = dataclasses.replace(config, **{"expert_map_path": str(path)})
    if config.quantization and torch_dtype == torch.float32:
        quantize_float32()
        if config.quantization == "mxfp8":
            return_float32()
    engine = VllmEngine(
        folder,
        config,
        Sampling(1.0, NEW_TOKENS, (1,)),
        run_id="rollout",
        kv_bytes_per_token=4096,
        engine_arguments={"enable_return_routed_experts": True} if settings.get("routing") else None,
    )
    if not settings.get("cast_prompts", True):
        keep_float32()
    numbers = settings["prompts"][rank] if "prompts" in settings else range(len(PROMPTS))
    prompts = [PROMPTS[number] for number in numbers]
    if length := settings.get("longest", 0):
        prompts[0] = [(3 * place) % 97 + 20 for place in range(length)]
    requests = [GenerationRequest(list(prompt), 7 + number) for number, prompt in zip(numbers, prompts)]

    def used() -> int:
        free, total = torch.npu.mem_get_info()
        return (total - free) >> 20

    replica_ranks, proven = tp * settings.get("sharing", 1), []
    sync = QuantizedSync(engine, str(config.quantization), torch_dtype, replica_ranks, delta=settings.get("delta", False))

    def push(version: int, scale: float = 1.0) -> None:
        from safetensors.torch import load_file

        tensors = dict(split_experts(load_file(folder / "weights" / "model.safetensors")))
        if not settings.get("tower", True):
            tensors = {name: t for name, t in tensors.items() if "visual" not in name}
        scaled = lambda name: scale if re.search(MLPS, name) else 1.0  # noqa: E731
        changed = {name: (t * scaled(name)).to(torch_dtype) for name, t in tensors.items()}
        if config.quantization:
            proven.append(sync.load(changed, version))
        else:
            engine.load_weights(((name, t.to("npu")) for name, t in changed.items()), version)

    sides = Sides()

    def sample_tokens() -> list[tuple[list[int], list[float]]]:
        return [(completion.token_ids, completion.log_probs) for completion in engine.generate(requests)]

    def sample_sides() -> list[tuple[list[int], list[float]]]:
        """Sample, and let the definition take the engine's sides at edges of rounding."""
        if not config.quantization:
            return sample_tokens()
        return sides.record(sample_tokens, folder.parent, rank, dist.get_world_size())

    # the reference computes as the format is defined; of several ranks, another one has one scale for each token
    one_scale = copy.deepcopy(reference) if config.quantization and tp > 1 else None
    if one_scale is not None:
        quantize_reference(one_scale, str(config.quantization), torch_dtype)
    if config.quantization:
        expert_ranks = 1 if config.enable_expert_parallel else tp
        quantize_reference(reference, config.quantization, torch_dtype, tp, expert_ranks, sides)
    result: dict[str, object] = {"built_mib": used()}
    engine.restore_memory("weights")
    push(0)
    engine.restore_memory("cache")
    first = sample_sides()
    result["tokens"], memory, equal, limited = [tokens for tokens, _ in first], [], [], []
    # greedy responses, which must be what transformers decodes
    greedy = engine.generate(requests, Sampling(0.0, NEW_TOKENS, (1,)))
    same_greedy = []
    for prompt, completion in zip(prompts, greedy):
        with torch.no_grad():
            row = torch.tensor([[*prompt, *completion.token_ids]])
            wanted = reference(row).logits[0, len(prompt) - 1 : -1].argmax(-1)
        same_greedy.append(wanted.tolist() == completion.token_ids)
    result["same_greedy"] = same_greedy
    if settings.get("routing"):  # of each token that was computed, the experts that transformers chooses
        same_experts = []
        for prompt, completion in zip(prompts, greedy):
            with torch.no_grad():
                row = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
                logits = torch.stack(reference(row, output_router_logits=True).router_logits, 1)
            wanted = logits.topk(reference.config.num_experts_per_tok).indices.sort(-1).values
            same_experts.append(torch.equal(torch.from_numpy(completion.routing).long().sort(-1).values, wanted))
        result["same_experts"] = same_experts
    for keys in settings.get("sampling", ()):  # greedy, with keys of `sampling_config`; the end token is one that comes
        sampling = SamplingConfig(max_tokens=NEW_TOKENS, temperature=0.0, **keys)
        end = SimpleNamespace(eos_token_id=greedy[0].token_ids[2])
        responses = [completion.token_ids for completion in engine.generate(requests, build_sampling(sampling, folder, end))]
        wanted = [decode(reference, prompt, sampling, end.eos_token_id) for prompt in prompts]
        limited.append([[len(tokens) for tokens in responses], responses == wanted])
    result["limited"] = limited
    if "drafts" in settings:
        from mindspeed_rl.adaptors import vllm_drafts

        vllm_drafts.counts.take()
        again = engine.generate(requests, Sampling(0.0, NEW_TOKENS, (1,)))
        result["again"] = [response.token_ids for response in again] == [response.token_ids for response in greedy]
        result["drafts"] = vllm_drafts.counts.take()

    def gaps(responses: list[tuple[list[int], list[float]]], temperature: float, model: Any = reference) -> list[float]:
        result = [] if prompts else [0.0]  # a die may get none
        for prompt, (tokens, log_probs) in zip(prompts, responses):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            wanted = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            result += (wanted - torch.tensor(log_probs)).abs().tolist()
        return result

    if settings.get("counts", True) and "drafts" not in settings and tp == 1 and dist.get_world_size() == 1:
        result["decode_kernels"] = {count: count_decode(engine, count) for count in (1, 3, 8)}
        alone = engine.generate(requests[1:2], Sampling(1.0, NEW_TOKENS, (1,)))
        result["same_alone"] = alone[0].token_ids == first[1][0]
    drifts = gaps(first, 1.0)
    result["worst"], result["mean"] = max(drifts), sum(drifts) / len(drifts)
    result["close"] = sum(drift < 1e-5 for drift in drifts) / len(drifts)
    if one_scale is not None:
        result["worst_one_scale"] = max(gaps(first, 1.0, one_scale))
    sampled = [value for _, log_probs in first for value in log_probs]
    result["mean_log_prob"] = sum(sampled) / max(len(sampled), 1)
    # vLLM applies min_p to no draft
    cut = engine.generate(requests, Sampling(0.7, NEW_TOKENS, (1,), min_p=0.0 if "drafts" in settings else 0.05))
    result["worst_cut"] = max(gaps([(completion.token_ids, completion.log_probs) for completion in cut], 0.7))
    if settings.get("disturbed"):
        result |= compare_disturbed(engine, requests, prompts, reference)
    for version in range(1, 1 + settings.get("rounds", 2)):
        if version > 1:  # all that a push writes need not be kept
            every = lambda model: [  # noqa: E731
                value.data for name, value in model.named_parameters() if not name.endswith(DERIVED)
            ]
            engine.list_replaced = sync.list_replaced if config.quantization else every
        before = used()
        engine.release_memory()
        memory.append([before, used()])
        if engine.hooks._kept is not None:
            result["kept_bytes"] = engine.hooks._kept.num_bytes
        engine.restore_memory("weights")
        push(version)
        engine.restore_memory("cache")
        equal.append(sample_tokens() == first)
    result["graphs"] = compilation_counter.num_cudagraph_captured
    result |= {"memory": memory, "equal": equal, "weight_bytes": engine.resident_bytes()["rollout weights"]}
    engine.release_memory()
    engine.restore_memory("weights")
    push(9, 3.0)
    engine.restore_memory("cache")
    other = sample_sides()
    result["other_weights_differ"] = other != first
    with torch.no_grad():
        for name, value in reference.named_parameters():
            if re.search(MLPS, name):
                value.copy_((value * 3.0).to(torch_dtype))
    result["worst_other"] = max(gaps(other, 1.0))
    result["taken"] = [sides.num_taken, sides.num_elements]
    if config.quantization:
        if settings.get("delta"):
            result["stays_damaged"] = sync.stays_damaged(9)
        result |= {"proven": proven, "in_bytes": sync.list_types(), "damage": sync.find_damage()}
    import simulator

    result["calls"] = {name: count for name, count in simulator.calls.items() if not name.startswith("aten::")}
    report(result)


if __name__ == "__main__":
    main()

# ruff: noqa: E402  (Megatron and vLLM must be imported after the adaptors)
"""Run by one process: the quantized engine of a model with a tower has the products and log-probs of its format's definition.

usage: quantized_tower_program.py FOLDER images|text FORMAT PICTURE VIDEO  (a Hugging Face folder with weights in bfloat16;
text: `language_model_only`; FORMAT none: not quantized). Prints JSON.

Every product of a quantized layer is computed again by definition in float64, from the published weights by their names and
from the layer's own inputs; log-probs by transformers' model in float32 with such products.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ.update(MINDSPEED_RL_VISION="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

sys.path.append(str(Path(__file__).parents[1]))

import torch
from microscaling import round_blocks
from rollout_jobs import Pair  # applies the adaptors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_jobs import KEYS
from transformers import AutoModelForImageTextToText

from mindspeed_rl.adaptors.vllm_cpu_linear import LiveLinear
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.data.images import ImageReader, ImageRules, StoredVideo, list_parts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.build import build_model
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine

#: a matrix of the engine -> the published ones that it joins
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}
#: last parts of the names of linear layers that are not quantized
KEPT = ("in_proj_a", "in_proj_b", "gate", "shared_expert_gate", "lm_head")
#: weights that the second sync changes, by the ends of their names
CHANGED = (
    *("layers.0.linear_attn.in_proj_z.weight", "layers.0.linear_attn.conv1d.weight", "layers.0.linear_attn.A_log"),
    *("layers.2.linear_attn.out_proj.weight", "layers.2.linear_attn.in_proj_b.weight", "layers.1.self_attn.k_proj.weight"),
    *("layers.1.mlp.up_proj.weight", "layers.1.mlp.experts.2.up_proj.weight", "layers.2.mlp.experts.1.down_proj.weight"),
    *("layers.0.mlp.shared_expert.down_proj.weight", "layers.1.mlp.shared_expert_gate.weight", "embed_tokens.weight"),
    *("visual.blocks.0.mlp.linear_fc1.weight", "language_model.norm.weight"),
)


def integers(x: Tensor, largest: int, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Symmetric integers by their definition, and the unit of each element that lies at an edge of rounding."""
    parts = x.reshape(*x.shape[:-1], -1, block or x.shape[-1])
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    if block:  # stored in the type of the engine
        scales = scales.bfloat16().double()
    quotients = parts / scales
    at_edge = (quotients - quotients.floor() - 0.5).abs() < largest * 2.0**-22
    rounded = torch.round(quotients).clamp(-largest, largest) * scales
    return rounded.view(x.shape), (at_edge * scales).view(x.shape)


def microscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8, of which no element is taken for one at an edge of rounding."""
    return round_blocks(x), torch.zeros_like(x)


def define(quantization: str) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """How a format rounds activations and weights."""
    if quantization == "mxfp8":
        return microscaled, microscaled
    return lambda x: integers(x, 127), lambda x: integers(x, 127) if quantization == "int8" else integers(x, 7, 32)


class Definition:
    """Products of a format by its definition, in float64."""

    def __init__(self, quantization: str) -> None:
        self._tokens, self._weights = define(quantization)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._tokens(x.double())[0] @ self._weights(weight.double())[0].t()

    def compare(self, x: Tensor, weight: Tensor, output: Tensor) -> float:
        """The largest difference of a product, in units of what rounding and elements at an edge may make of it."""
        (rows, row_edges), (columns, column_edges) = self._tokens(x.double()), self._weights(weight.double())
        want = rows @ columns.t()
        # of the result to bfloat16, and of the sums in float32
        rounding = 2.0**-8 * want.abs() + 1e-6 * (rows.abs() @ columns.abs().t())
        edges = row_edges @ (columns.abs() + column_edges).t() + rows.abs() @ column_edges.t()
        return ((output.double() - want).abs() / (rounding + edges).clamp(min=1e-30)).max().item()

    def hook(self, model: nn.Module) -> Iterator[Any]:
        """Give transformers' language model these products; yields what removes them."""

        def linear(layer: Any, inputs: Any, output: Tensor) -> Tensor:
            return self.multiply(inputs[0], layer.weight.data).to(output.dtype)

        def experts(layer: Any, inputs: Any, output: Tensor) -> Tensor:
            x, ids, factors = (one.view(-1, one.shape[-1]) for one in inputs)
            total = torch.zeros(x.shape, dtype=torch.float64)
            for token in range(len(x)):
                for expert, factor in zip(ids[token].tolist(), factors[token].tolist()):
                    gate, up = self.multiply(x[token][None], layer.gate_up_proj.data[expert]).float().chunk(2, dim=-1)
                    inner = nn.functional.silu(gate) * up
                    total[token] += factor * self.multiply(inner, layer.down_proj.data[expert])[0]
            return total.to(output.dtype).view(output.shape)

        for name, module in model.named_modules():
            if "language_model.layers." not in name:
                continue
            if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
                yield module.register_forward_hook(experts)
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in KEPT:
                yield module.register_forward_hook(linear)


def find_products(model: nn.Module, published: dict[str, Tensor]) -> Iterator[tuple[str, Any, Tensor]]:
    """Names of the engine's quantized products, what computes each, and the published weights that belong to it."""
    for name, module in model.named_modules():
        owner: Any = module
        source = name.replace("language_model.model.", "model.language_model.")
        if (elements := getattr(owner, "weight", None)) is not None and elements.dtype in (torch.int8, torch.uint8):
            before, _, end = source.rpartition(".")
            yield name, owner.cpu_linear, torch.cat([published[f"{before}.{part}.weight"] for part in JOINED.get(end, (end,))])
        if products := getattr(owner, "cpu_experts", None):
            assert source.endswith(".experts.routed_experts"), source
            count, before = len(products) // 2, source.removesuffix(".routed_experts")
            for expert in range(count):
                up = [published[f"{before}.{expert}.{part}_proj.weight"] for part in ("gate", "up")]
                yield f"{name}.{expert}.w13", products[expert], torch.cat(up)
                yield f"{name}.{expert}.w2", products[count + expert], published[f"{before}.{expert}.down_proj.weight"]


def record(found: list[tuple[str, Any, Tensor]]) -> tuple[list[tuple[str, Tensor, Tensor, Tensor]], Callable[[], None]]:
    """Records inputs and outputs of the products; returns the list, and a function that stops recording."""
    calls: list[tuple[str, Tensor, Tensor, Tensor]] = []

    def watch(name: str, product: LiveLinear, weight: Tensor) -> None:
        multiply = product.multiply  # type: ignore[attr-defined]

        def multiply_and_keep(x: Tensor, *others: Any) -> Tensor:
            output = multiply(x, *others)
            calls.append((name, weight, x.reshape(-1, x.shape[-1]).clone(), output.reshape(-1, output.shape[-1]).clone()))
            return output

        product.multiply = multiply_and_keep  # type: ignore[attr-defined]

    for entry in found:
        watch(*entry)

    def end() -> None:
        for _, product, _ in found:
            del product.multiply

    return calls, end


class Prompts:
    """Prompts of text, and with a reader also with images and videos."""

    def __init__(self, folder: str, rules: ImageRules | None, media: dict[str, str]) -> None:
        self.rules, self._media = rules, media
        self._reader = None if rules is None else ImageReader.build(rules, load_tokenizer(folder))
        self.names = ("",) if rules is None else ("", "i", "v", "iv")

    def build(self, name: str, seed: int) -> tuple[list[int], list[str], tuple[Any, ...]]:
        """Tokens, references and prepared media of the prompt of a name: i for an image, v for a video."""
        if self._reader is None or self.rules is None:
            return [40 + seed, 41, 60, 42][: 2 + seed % 3], [], ()
        assert self.rules.video is not None
        (start, end), ids = self.rules.frame, {"i": self.rules.token_id, "v": self.rules.video.token_id}
        media = [self._media[kind] for kind in name]
        references = [self._reader.read_video(one) if kind == "v" else one for kind, one in zip(name, media)]
        turn = [40 + seed, *(token for kind in name for token in (start, ids[kind], end, 41)), 42]
        ((prompt, _),), stored = self._reader.expand([(turn, [])], references)
        return prompt, references, stored


def reference_log_probs(model: Any, row: Tensor, prompt: int, stored: tuple[Any, ...], rules: ImageRules | None) -> Tensor:
    """transformers' log-probs of the tokens after the prompt."""
    kinds = torch.zeros_like(row)
    inputs: dict[str, Tensor] = {}
    if rules is not None and rules.video is not None:
        before = torch.arange(len(row)) < prompt
        kinds[(row == rules.token_id) & before] = 1
        kinds[(row == rules.video.token_id) & before] = 2
    for kind, pixels, grid in ((False, "pixel_values", "image_grid_thw"), (True, "pixel_values_videos", "video_grid_thw")):
        some = [one for one in stored if isinstance(one, StoredVideo) == kind]
        if some:
            inputs |= {
                pixels: torch.cat([part.read() for part in list_parts(some)]),
                grid: torch.tensor([one.grid for one in some]),
            }
    with torch.no_grad():
        logits = model(input_ids=row[None], mm_token_type_ids=kinds[None].int(), **inputs).logits[0, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, row[prompt:, None])[:, 0]


def sample(rollout: VllmEngine, prompts: Prompts, sampling: Sampling, name: str, count: int) -> list[tuple[Any, ...]]:
    """Responses to prompts of a name; those with a token of an image or a video are left out, which transformers would fill."""
    results = []
    for seed in range(count):
        prompt, media, stored = prompts.build(name, seed)
        rollout.add_request(f"{name}{seed}", prompt, dataclasses.replace(sampling, images=tuple(media)), seed)
        done: dict[str, Any] = {}
        while not done:
            done.update(rollout.step())
        (answer,) = done.values()
        ids = answer.token_ids
        if (
            prompts.rules is None
            or prompts.rules.video is None
            or not {*ids} & {prompts.rules.token_id, prompts.rules.video.token_id}
        ):
            results.append((prompt, stored, answer))
    return results


def main(folder: str, mode: str, quantization: str, *media: str) -> None:
    """Print the report."""
    only_text, named = mode == "text", None if quantization == "none" else quantization
    keys = {"language_model_only": True, "freeze_vit": True, "freeze_aligner": True} if only_text else {}
    config = MegatronConfig(**KEYS | {"bf16": True} | keys)
    rules = None if only_text else ImageRules.read(folder)
    parallel.init_process_group(parallel.RankInfo.from_env(), 120)
    plan = plan_model(config, folder)
    parallel._init_model_parallel(config, plan.layout.vpp, 120)
    parallel._seed_all(1)
    model = build_model(config, plan, trainable=True)
    generate = GenerateConfig(
        infer_tensor_parallel_size=1,
        max_num_seqs=4,
        max_model_len=500,
        max_num_batched_tokens=600,
        enable_prefix_caching=False,
        dtype="bfloat16",
        kv_cache_memory_gib=0.1,
        limit_mm_video_per_prompt=0 if only_text else 1,
        quantization=named,
    )
    sampling = Sampling(1.0, 12, (1,))
    rollout = VllmEngine(folder, generate, sampling, run_id="towers", kv_bytes_per_token=4096, image_rules=rules)
    stream = WeightStream(model, bucket_bytes=1 << 16)
    pair = Pair(None, stream, rollout, 1, delta=True, quantization=named, dtype=torch.bfloat16)  # type: ignore[arg-type]
    report: dict[str, Any] = {"proven": [], "beyond": [], "exact": [], "full": [], "at_rest": []}
    prompts = Prompts(folder, rules, dict(zip("iv", media)))
    second = Path(folder, "second")
    for folder_now in (Path(folder), second):
        if folder_now == second:
            save_second(Path(folder), second)
        load_weights(model, HfFolder(folder_now))
        pair.push()
        rollout.restore_memory("cache")
        report["proven"].append(pair.prove())
        published = load_file(folder_now / "model.safetensors")
        reference = AutoModelForImageTextToText.from_pretrained(folder_now, dtype=torch.float32, attn_implementation="eager")
        compare(rollout, prompts, sampling, reference, published, named, report)
    before = [answer for *_, answer in sample(rollout, prompts, sampling, prompts.names[-1], 2)]
    rollout.release_memory()
    rollout.restore_memory("weights")
    rollout.restore_memory("cache")
    report["at_rest"] = [answer for *_, answer in sample(rollout, prompts, sampling, prompts.names[-1], 2)] == before
    report["proven"].append(pair.prove())
    inspect(rollout.get_model(), report)
    if named is not None:
        damage(rollout, pair, prompts, sampling, reference, published, named, report)
    print(json.dumps(report), flush=True)
    os._exit(0)  # vLLM's threads would keep the process


def save_second(folder: Path, second: Path) -> None:
    """Write the folder of the second sync, in which some weights differ."""
    second.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (second / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(CHANGED) and not name.startswith("mtp."):
            tensors[name] = (tensor * -1.5 if tensor.dim() > 1 else tensor * 1.25).bfloat16().float()
    save_file(tensors, second / "model.safetensors", {"format": "pt"})


def compare(
    rollout: VllmEngine,
    prompts: Prompts,
    sampling: Sampling,
    reference: Any,
    published: dict[str, Tensor],
    quantization: str | None,
    report: dict[str, Any],
) -> None:
    """Add the largest difference of a product, and median differences of log-probs by the kind of prompt."""
    found = [] if quantization is None else list(find_products(rollout.get_model(), published))
    calls, end = record(found)
    answers = {name: sample(rollout, prompts, sampling, name, 6 if name else 8) for name in prompts.names}
    end()
    if quantization is not None:
        definition = Definition(quantization)
        beyond: dict[str, float] = {}
        for name, weight, x, output in calls:
            beyond[name] = max(beyond.get(name, 0.0), definition.compare(x, weight, output))
        report["beyond"].append(beyond)
    for kind in ("full", "exact")[: 1 + (quantization is not None)]:
        hooks = list(Definition(str(quantization)).hook(reference)) if kind == "exact" else []
        medians = {}
        for name, some in answers.items():
            differences: list[Tensor] = []
            for prompt, stored, answer in some:
                row = torch.tensor([*prompt, *answer.token_ids])
                want = reference_log_probs(reference, row, len(prompt), stored, prompts.rules)
                differences.append((torch.tensor(answer.log_probs) - want).abs())
            medians[name] = float(torch.cat(differences).median())  # some token may choose another expert
        report[kind].append(medians)
        for hook in hooks:
            hook.remove()


def inspect(model: nn.Module, report: dict[str, Any]) -> None:
    """Add the quantized parameters of two layers, and the types of the tower's."""
    parameters = dict(model.named_parameters())
    stored = [name for name, value in parameters.items() if value.dtype in (torch.int8, torch.uint8)]
    for layer in (0, 1):
        mark = f"layers.{layer}."
        some = [name.partition(mark)[2] for name in stored if mark in name and "visual." not in name]
        report[f"layer{layer}"] = sorted(name for name in some if not name.endswith("_scale"))
    report["elsewhere"] = [name for name in stored if not name.startswith("language_model.model.layers.")]
    report["tower"] = sorted({str(value.dtype) for name, value in parameters.items() if "visual." in name})


def damage(
    rollout: VllmEngine,
    pair: Pair,
    prompts: Prompts,
    sampling: Sampling,
    reference: Any,
    published: dict[str, Tensor],
    quantization: str,
    report: dict[str, Any],
) -> None:
    """Add what is said of the scales of one layer that are wrong: by the proof, the products and the log-probs."""
    parameters = dict(rollout.get_model().named_parameters())
    name = next(name for name in parameters if name.endswith("layers.2.linear_attn.in_proj_qkvz.weight_scale"))
    rollout.hooks.before_load(rollout.get_model())
    scales = parameters[name].data
    scales.add_(1) if scales.dtype == torch.uint8 else scales.mul_(1.03125)  # a power of two more, or 1/32
    rollout.hooks.after_load(rollout.get_model())
    try:
        pair.prove()
        report["damaged"] = ""
    except WeightDeliveryError as error:
        report["damaged"] = str(error)
    compare(rollout, prompts, sampling, reference, published, quantization, report)


if __name__ == "__main__":
    main(*sys.argv[1:4], *sys.argv[4:])

"""vllm-ascend on the simulated NPU with prompts of images and videos; transformers on the CPU computes the log-probs again."""

from __future__ import annotations

import json
import os
import random
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import MODELS
from quantized_reference import QuantizedSync, quantize_float32, quantize_reference, return_float32, split_experts
from ranks import rank_settings, report
from rollout import keep_float32

NEW_TOKENS = 6
#: Qwen3-VL-MoE whose rows are whole blocks of MXFP8, whole groups of int4
SIZES = {
    "qwen3_moe_blocks": {"moe_intermediate_size": 64},
    "qwen3_moe_groups": {"hidden_size": 256, "moe_intermediate_size": 256},
}
#: part of the names of what the last sync changes, in the tower too
CHANGED = ".mlp."


def main() -> None:
    """One engine, whose prompts have images and videos, none, one and several."""
    settings = rank_settings()
    family, quantization, seed = settings["model"], settings.get("quantization"), settings.get("seed", 5)
    os.environ["MINDSPEED_RL_VISION"] = "1"
    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.config import GenerateConfig

    device = platform.select("npu")
    adaptors.apply("rollout")
    device.set_device(0)
    import tiny_vision
    from safetensors.torch import load_file
    from scripts import load_script
    from transformers import AutoModelForImageTextToText
    from video_files import write_video

    from mindspeed_rl.data.images import ImageReader, ImageRules, StoredImage, list_parts
    from mindspeed_rl.data.media_limits import MediaLimits
    from mindspeed_rl.data.tokenizer import load_tokenizer
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import VllmEngine

    example = load_script("examples/vision/make_task.py")
    folder = Path(os.environ["NPU_SIM_REPORT_DIR"], "model")
    if family.startswith("qwen3_5"):
        tiny_vision.save_for_the_example(example, folder, MODELS[family])
    elif family.startswith("qwen3"):
        tiny_vision.save_for_the_example(example, folder, experts=family != "qwen3", **SIZES.get(family, {}))
    else:
        example.save_model(folder)
    # the processor's own limits would make smaller frames
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"shortest_edge": 784, "longest_edge": 1568}}))
    limits = MediaLimits(video_max_pixels=6 * 56 * 56 if family.startswith("qwen3") else 56 * 56)
    pictures = []
    for index in range(2):
        pictures.append(str(folder / f"{index}.png"))
        Path(pictures[-1]).write_bytes(example.draw_picture(random.Random(index))[0])
    rules = ImageRules.read(folder, limits)
    assert rules is not None and rules.video is not None
    reader = ImageReader.build(rules, load_tokenizer(str(folder)))
    files = [write_video(folder / "long.avi", 41, fps=10.0), write_video(folder / "wide.avi", 33, 48, 80, fps=11.0, seed=1)]
    videos = [reader.read_video(str(file)) for file in files]
    dist.init_process_group("hccl")
    config = GenerateConfig(
        infer_tensor_parallel_size=1,
        max_num_seqs=4,
        max_model_len=256,
        max_num_batched_tokens=512,
        dtype="float32",
        gpu_memory_utilization=0.05,
        enforce_eager=True,
        enable_prefix_caching=False,
        limit_mm_image_per_prompt=2,
        limit_mm_video_per_prompt=2,
        quantization=quantization,
    )
    if quantization:
        quantize_float32()
    if quantization == "mxfp8":
        return_float32()
    engine = VllmEngine(folder, config, Sampling(1.0, NEW_TOKENS, (1,)), run_id="v", kv_bytes_per_token=4096, image_rules=rules)
    if family.startswith("qwen3_5"):
        keep_float32()
    weights = dict(split_experts(load_file(folder / "model.safetensors")))
    sync, proven = QuantizedSync(engine, str(quantization), torch.float32), []

    def push(version: int, scale: float = 1.0) -> None:
        changed = {name: t * (scale if CHANGED in name else 1.0) for name, t in weights.items()}
        engine.restore_memory("weights")
        if quantization:
            proven.append(sync.load(changed, version))
        else:
            engine.load_weights(((name, t.to("npu")) for name, t in changed.items()), version)
        engine.restore_memory("cache")

    references = [
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for _ in range(2)
    ]
    if quantization:
        quantize_reference(references[0], quantization, torch.float32)
    start, end = rules.frame
    spaces = {rules.token_id, rules.video.token_id}
    marks = {
        "t": [50 + index for index in range(20)],
        "i": [start, rules.token_id, end],
        "v": [start, rules.video.token_id, end],
    }

    def compute_gaps(reference: Any, prompt: list[int], stored: list[Any], completion: Any) -> torch.Tensor:
        """Return how far the log-probs of a response are from transformers', up to a token that it takes for an image's."""
        tokens = list(takewhile(lambda token: token not in spaces, completion.token_ids))
        row = torch.tensor([[*prompt, *tokens]])
        inputs: dict[str, Any] = {"mm_token_type_ids": (row == rules.token_id).int() + 2 * (row == rules.video.token_id).int()}
        images = [one for one in stored if isinstance(one, StoredImage)]
        clips = [one for one in stored if not isinstance(one, StoredImage)]
        for names, some in ((("pixel_values", "image_grid_thw"), images), (("pixel_values_videos", "video_grid_thw"), clips)):
            if some:
                patches = torch.cat([part.read() for part in list_parts(some)])
                inputs |= dict(zip(names, (patches, torch.tensor([one.grid for one in some]))))
        if clips and not rules.video.has_timestamps:
            steps = [rules.video.compute_time_step(one.clip) / rules.video.tokens_per_second for one in clips]
            inputs["second_per_grid_ts"] = torch.tensor(steps)
        with torch.no_grad():
            logits = reference(input_ids=row, **inputs).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return (expected - torch.tensor(completion.log_probs[: len(tokens)])).abs()

    def compare() -> dict[str, dict[str, float]]:
        """Return differences from the reference, of each prompt, and the largest ones from a model that is not quantized."""
        worst, mean, plain = {}, {}, {}
        for number, kinds in enumerate(("", "t", "i", "ii", "v", "vv", "viv")):
            following = {"i": iter(pictures), "v": iter(videos)}
            media = tuple(next(following[kind]) for kind in kinds if kind in following)
            turns = [([40, *(id_ for kind in kinds for id_ in [*marks[kind], 41])], [])]
            ((prompt, _),), stored = reader.expand(turns, media)
            engine.add_request(kinds, prompt, Sampling(1.0, NEW_TOKENS, (1,), images=media), seed + number)
            done = {}
            while not done:
                done.update(engine.step())
            gaps, others = (compute_gaps(reference, prompt, stored, done[kinds]) for reference in references)
            worst[kinds], mean[kinds], plain[kinds] = float(gaps.max()), float(gaps.mean()), float(others.max())
        return {"worst": worst, "mean": mean, "plain": plain}

    push(0)
    syncs = [compare()]
    push(1)  # the same weights again
    engine.release_memory()
    push(2, 3.0)
    with torch.no_grad():
        for reference in references:
            for name, value in reference.named_parameters():
                if CHANGED in name:
                    value.mul_(3.0)
    syncs.append(compare())
    import simulator

    calls = {name: number for name, number in simulator.calls.items() if name.startswith("npu::")}
    quantized = {"proven": proven, "in_bytes": sync.list_types(), "damage": sync.find_damage()} if quantization else {}
    report({"syncs": syncs, "calls": calls} | quantized)


if __name__ == "__main__":
    main()

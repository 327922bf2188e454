"""vllm-ascend on the simulated NPU with prompts of images and videos; transformers on the CPU computes the log-probs again."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quantized_reference import QuantizedSync, quantize_float32, quantize_reference
from ranks import rank_settings, report

NEW_TOKENS = 6


def split_experts(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors with each expert by itself, as a weight sync sends them."""
    for name, tensor in tensors.items():
        before, _, end = name.rpartition(".")
        for expert, matrix in enumerate(tensor if end in ("gate_up_proj", "down_proj") else ()):
            parts = {"gate_proj": 0, "up_proj": 1} if end == "gate_up_proj" else {"down_proj": 0}
            for part, index in parts.items():
                yield f"{before}.{expert}.{part}.weight", matrix.chunk(len(parts))[index].clone()
        if end not in ("gate_up_proj", "down_proj"):
            yield name, tensor


def main() -> None:
    """One engine, whose prompts have images and videos, none, one and several."""
    settings = rank_settings()
    family, quantization = settings["model"], settings.get("quantization")
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
    if family.startswith("qwen3"):
        tiny_vision.save_for_the_example(example, folder, experts=family == "qwen3_moe")
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
    engine = VllmEngine(folder, config, Sampling(1.0, NEW_TOKENS, (1,)), run_id="v", kv_bytes_per_token=4096, image_rules=rules)
    engine.restore_memory("weights")
    weights = dict(split_experts(load_file(folder / "model.safetensors")))
    sync, proven = QuantizedSync(engine, str(quantization), torch.float32), []
    if quantization:
        proven = [sync.load(weights, version) for version in range(2)]
    else:
        engine.load_weights(((name, t.to("npu")) for name, t in weights.items()), 0)
    engine.restore_memory("cache")
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if quantization:
        quantize_reference(reference, quantization, torch.float32)
    start, end = rules.frame
    marks = {"i": [start, rules.token_id, end], "v": [start, rules.video.token_id, end]}
    worst, mean = {}, {}
    for number, kinds in enumerate(("", "i", "ii", "v", "vv", "viv")):
        following = {"i": iter(pictures), "v": iter(videos)}
        media = tuple(next(following[kind]) for kind in kinds)
        turns = [([40, *(id_ for kind in kinds for id_ in [*marks[kind], 41])], [])]
        ((prompt, _),), stored = reader.expand(turns, media)
        engine.add_request(kinds, prompt, Sampling(1.0, NEW_TOKENS, (1,), images=media), 5 + number)
        done = {}
        while not done:
            done.update(engine.step())
        completion = done[kinds]
        row = torch.tensor([[*prompt, *completion.token_ids]])
        inputs: dict[str, Any] = {"mm_token_type_ids": (row == rules.token_id).int() + 2 * (row == rules.video.token_id).int()}
        # what the model has sampled is text
        inputs["mm_token_type_ids"][:, len(prompt) :] = 0
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
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps = (expected - torch.tensor(completion.log_probs)).abs()
        worst[kinds], mean[kinds] = float(gaps.max()), float(gaps.mean())
    import simulator

    calls = {name: number for name, number in simulator.calls.items() if name.startswith("npu::")}
    quantized = {"proven": proven, "in_bytes": sync.list_types(), "damage": sync.find_damage()} if quantization else {}
    report({"worst": worst, "mean": mean, "calls": calls} | quantized)


if __name__ == "__main__":
    main()

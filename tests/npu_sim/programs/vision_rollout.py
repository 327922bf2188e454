"""vllm-ascend on the simulated NPU with prompts that have images; transformers on the CPU computes the log-probs once more."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import rank_settings, report

NEW_TOKENS = 6


def main() -> None:
    """One engine, whose prompts have no, one and two images."""
    rank_settings()
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

    from mindspeed_rl.data.images import ImageRules, prepare_images
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import VllmEngine

    example = load_script("examples/vision/make_task.py")
    folder = Path(os.environ["NPU_SIM_REPORT_DIR"], "model")
    tiny_vision.save_for_the_example(example, folder)
    pictures = []
    for index in range(2):
        pictures.append(str(folder / f"{index}.png"))
        Path(pictures[-1]).write_bytes(example.draw_picture(random.Random(index))[0])
    rules = ImageRules.read(folder)
    assert rules is not None
    dist.init_process_group("hccl")
    config = GenerateConfig(
        infer_tensor_parallel_size=1,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=256,
        dtype="float32",
        gpu_memory_utilization=0.05,
        enforce_eager=True,
        enable_prefix_caching=False,
        limit_mm_image_per_prompt=2,
    )
    engine = VllmEngine(folder, config, Sampling(1.0, NEW_TOKENS, (1,)), run_id="v", kv_bytes_per_token=4096, image_rules=rules)
    engine.restore_memory("weights")
    engine.load_weights(((name, t.to("npu")) for name, t in load_file(folder / "model.safetensors").items()), 0)
    engine.restore_memory("cache")
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    worst = []
    for count in range(3):
        images = prepare_images(rules, pictures[:count])
        prompt = [40]
        for image in images:
            prompt += [rules.frame[0], *[rules.token_id] * image.num_tokens, rules.frame[1], 41 + count]
        sampling = Sampling(1.0, NEW_TOKENS, (1,), images=tuple(pictures[:count]))
        engine.add_request(str(count), prompt, sampling, 5 + count)
        done = {}
        while not done:
            done.update(engine.step())
        completion = done[str(count)]
        row = torch.tensor([[*prompt, *completion.token_ids]])
        inputs = {"mm_token_type_ids": (row == rules.token_id).int()}
        if images:
            grids = torch.tensor([image.grid for image in images])
            inputs |= {"pixel_values": torch.cat([image.read() for image in images]), "image_grid_thw": grids}
        with torch.no_grad():
            logits = reference(input_ids=row, **inputs).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst.append(float((expected - torch.tensor(completion.log_probs)).abs().max()))
    import simulator

    report({"worst": worst, "calls": {name: number for name, number in simulator.calls.items() if name.startswith("npu::")}})


if __name__ == "__main__":
    main()

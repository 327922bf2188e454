"""A model of images on the simulated NPU or on the CPU: tower, projector and language model train on rows with images.

Modes: "cpu" and "npu", as of engine.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from ranks import rank_settings, report


def main() -> None:
    """Everything: libraries are imported after the platform is chosen."""
    settings = rank_settings()
    mode, layout = settings["mode"], settings.get("layout", {})
    os.environ["MINDSPEED_RL_VISION"] = "1"
    if mode == "npu":
        import simulator

        simulator.install()

    import torch

    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.config import MegatronConfig

    platform.select(mode)
    keys = {"freeze_vit": False, "freeze_aligner": False, "num_attention_heads": 4, "micro_batch_size": 2, "bf16": False}
    rate = {"lr": 2e-3, "min_lr": 2e-3, "lr_decay_style": "constant", "train_iters": 100, "clip_grad": 1.0}
    config = MegatronConfig(**rate | keys | layout)
    if mode == "npu":
        import without_mindspeed

        without_mindspeed.install()
    else:
        adaptors.apply("train")

    import tiny_vision

    from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
    from mindspeed_rl.checkpoint.hf import HfFolder
    from mindspeed_rl.engine import parallel
    from mindspeed_rl.engine.batching import MicroBatching, Rows
    from mindspeed_rl.engine.build import batch_shape, build_model
    from mindspeed_rl.engine.train_engine import TrainEngine
    from mindspeed_rl.engine.weights import load_weights
    from mindspeed_rl.models.plan import plan_model

    seen: list[tuple[float, int]] = []

    def negative_log_likelihood(inputs: LossInputs) -> LossOutput:
        loss = -torch.where(inputs.mask, inputs.outputs[0], 0.0).sum()
        seen.append((loss.item(), int(inputs.mask.sum())))
        return LossOutput(loss, inputs.mask.sum())

    wide, tall = tiny_vision.NoiseImage(1, 4, 8), tiny_vision.NoiseImage(2, 6, 2)
    images = [()] * 4 if config.language_model_only else [(wide,), (), (tall, wide), (wide,)]
    ids, prompts = [], []
    for index, some in enumerate(images):
        generator = torch.Generator().manual_seed(index)
        parts = [torch.randint(2, 120, (4,), generator=generator)]
        for image in some:
            tokens = [tiny_vision.START, *[tiny_vision.IMAGE] * (image.grid[1] * image.grid[2] // 4), tiny_vision.END]
            parts += [torch.tensor(tokens), torch.randint(2, 120, (2,), generator=generator)]
        prompts.append(sum(map(len, parts)))
        ids.append(torch.cat([*parts, torch.randint(2, 120, (6,), generator=generator)]))
    rows = Rows(ids, prompts, images=images)

    folder = tiny_vision.save(settings["model"], Path(os.environ["NPU_SIM_REPORT_DIR"], f"model{os.environ['RANK']}"))
    plan = plan_model(config, folder)
    info = parallel.RankInfo.from_env()
    platform.current().set_device(info.local_rank)
    parallel.init_process_group(info, 120.0)
    parallel._init_model_parallel(config, plan.layout.vpp, 120.0)
    parallel._seed_all(1)
    model = build_model(config, plan, trainable=True)
    load_weights(model, HfFolder(folder))
    with torch.no_grad():
        for parameter in model.models[0].parameters():
            if parameter.dim() > 1:
                parameter.div_(3.0)  # as transformers draws them: two platforms round differently, which large ones amplify
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0, vision=plan.model_config.vision))
    engine.start_training(1)
    if mode == "npu":
        simulator.calls.clear()
    steps = []
    for _ in range(2):
        seen.clear()
        outcome = engine.train_step(rows, MicroBatching(micro_batch_size=2), negative_log_likelihood)
        counted = parallel.is_output_source()
        loss, count = (sum(step[index] for step in seen) if counted else 0 for index in (0, 1))
        steps.append({"loss": loss, "count": count, "grad_norm": outcome.grad_norm})
    report({"steps": steps, "fused": dict(simulator.calls) if mode == "npu" else {}})


if __name__ == "__main__":
    main()

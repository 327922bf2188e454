"""Jobs that train models with multi-token-prediction layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import vision_jobs
from training_jobs import Setting, all_rows, engine_of, full_weights, my_rows, summary, weighted_loss

from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.weights import list_local_weights
from mindspeed_rl.resharding.layouts import full_slice
from mindspeed_rl.resharding.transfer import Sources


def masked_rows(with_images: bool = False) -> Rows:
    """The rows, of which some tokens do not train."""
    rows, generator = vision_jobs.all_rows() if with_images else all_rows(), torch.Generator().manual_seed(5)
    masks = [torch.rand(len(weights), generator=generator) < 0.8 for weights in rows.columns["weights"]]
    return dataclasses.replace(rows, columns={**rows.columns, "loss_mask": masks})


def train(setting: Setting, steps: int = 3, with_images: bool = False) -> dict[str, Any]:
    """Trains; see `training_jobs.train`."""
    with engine_of(setting) as engine:
        rows = my_rows(masked_rows(with_images))
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        return summary(results, full_weights(engine))


def first_step(setting: Setting, with_images: bool = False) -> dict[str, Any]:
    """Loss, prediction loss, logits of the prediction layers where they have targets, and all gradients, on one process."""
    with engine_of(setting) as engine:
        (model,), results, gradients = engine.model.models, [], {}
        num_layers = engine.model.plan.model_config.mtp_num_layers
        model.mtp.register_forward_hook(
            lambda module, inputs, output: results.append(output.detach().chunk(1 + num_layers)[1:])
        )

        def collect() -> None:
            weights = list_local_weights(engine.model)
            with_gradients = [w for w in weights if w.parameter is not None and hasattr(w.parameter, "main_grad")]
            sources = Sources([dataclasses.replace(w, tensor=w.parameter.main_grad) for w in with_gradients], {})  # pyrefly: ignore
            for weight in with_gradients:
                for name, shape in zip(weight.op.hf, weight.op.shapes):
                    gradients[name] = torch.zeros(shape)
                    sources.read(name, full_slice(shape), gradients[name])

        engine.on_gradients.append(collect)
        rows = masked_rows(with_images)
        micro_batch = engine._micro_batches(rows, setting.batching)[0]
        tied = model.share_embeddings_and_output_weights
        weight = (model.shared_embedding_or_output_weight() if tied else model.output_layer.weight).detach().clone()
        result = engine.train_step(rows, setting.batching, weighted_loss)
        logits = [
            (hidden.flatten(0, 1)[targets.hidden_index] @ weight.t()).numpy()
            for hidden, targets in zip(results[0], micro_batch.predictions)
        ]
        return {
            "metrics": result.metrics,
            "logits": logits,
            "gradients": {name: value.numpy() for name, value in gradients.items()},
        }

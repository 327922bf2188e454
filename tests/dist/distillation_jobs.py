"""Jobs that judge rows as a teacher, and make a step of distillation on the judgements."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from policy_jobs import from_last_stage, policy_rows
from training_jobs import Setting, engine_of, full_weights, summary

from mindspeed_rl.algorithms.distillation import compute_weighted_divergence
from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.keys.rl import DistillationKeys
from mindspeed_rl.engine.head_outputs import TeacherDivergence, TopLogProbs
from mindspeed_rl.run.objective import build_objective

K = 6
#: two teachers, the same model at other temperatures
TEMPERATURES = (0.6, 1.7)


def distill(setting: Setting) -> dict[str, Any]:
    """Makes a step of each divergence; `judged` are the rows of this rank with their teachers' columns."""
    with engine_of(setting) as engine:
        rows = policy_rows(engine, setting)
        passes = [(TopLogProbs(K), temperature) for temperature in TEMPERATURES] + [(None, TEMPERATURES[0])]
        *result, sampled = (
            from_last_stage(engine.forward(rows, setting.batching, outputs, temperature=temperature))
            for outputs, temperature in passes
        )
        assert sampled is not None and all(result)
        columns = {
            name: [torch.cat(pair, -1) for pair in zip(*(part[item] for part in result if part))]
            for item, name in enumerate(("teacher_log_probs", "teacher_ids"))
        }
        rows = replace(rows, columns={**rows.columns, **columns})
        results = []
        for mode, rest in (("reverse_kl_topk", "lump"), ("forward_kl_topk", "drop"), ("jsd_topk", "lump")):
            keys = DistillationKeys(
                enabled=True,
                loss_mode=mode,
                topk=K,
                topk_rest=rest,
                use_task_rewards=False,
                teacher_models=["first", "second"],
                teacher_weights=[1.0, 3.0],
            )
            objective = build_objective(RLConfig(loss_type="dapo", init_kl_coef=0.0, distillation=keys), "ray_grpo")
            assert objective.distillation is not None
            engine.outputs = TeacherDivergence(partial(compute_weighted_divergence, settings=objective.distillation))
            loss = partial(policy_loss, objective=objective)
            results.append(engine.train_step(rows, setting.batching, loss, PolicyBatch.from_inputs))
        judged = [
            [row.tolist() for row in values] for values in (columns["teacher_log_probs"], columns["teacher_ids"], sampled[0])
        ]
        ids = [row.tolist() for row in rows.input_ids]
        return {**summary(results, full_weights(engine)), "judged": list(zip(ids, *judged))}

"""Jobs that train on the engine; each builds a world, a layout and a model of its own, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl import adaptors, platform

platform.select(os.environ.get("TEST_PLATFORM", "cpu"))
adaptors.apply("train")

from megatron.core import parallel_state  # noqa: E402  (Megatron must be imported after the adaptor)

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PendingMetrics, masked_mean  # noqa: E402
from mindspeed_rl.checkpoint.hf import HfFolder  # noqa: E402
from mindspeed_rl.config import MegatronConfig  # noqa: E402
from mindspeed_rl.engine import parallel  # noqa: E402
from mindspeed_rl.engine.batching import MicroBatching, Rows  # noqa: E402
from mindspeed_rl.engine.build import batch_shape, build_model  # noqa: E402
from mindspeed_rl.engine.interface import StepResult  # noqa: E402
from mindspeed_rl.engine.train_engine import TrainEngine  # noqa: E402
from mindspeed_rl.engine.weights import load_weights  # noqa: E402
from mindspeed_rl.models.plan import plan_model  # noqa: E402
from mindspeed_rl.resharding.transfer import WeightStream  # noqa: E402

TEMPERATURE = 0.8
KEYS = {
    "bf16": False,
    "lr": 1e-3,
    "train_iters": 20,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "lr_warmup_init": 1e-4,
    "adam_eps": 1e-5,  # updates of elements with almost no gradient would show nothing but rounding
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "loss_chunk_size": 16,
}


@dataclass
class Setting:
    """One way to train.

    Attributes:
        folder: Hugging Face folder.
        keys: of MegatronConfig, on top of KEYS.
        packed, shares_prefixes, micro_batch_size, token_budget: how rows become micro-batches.
    """

    folder: str
    keys: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    micro_batch_size: int = 2
    token_budget: int | None = None
    shares_prefixes: bool = False

    @property
    def batching(self) -> MicroBatching:
        return MicroBatching(self.micro_batch_size, self.token_budget)


def all_rows() -> Rows:
    """Eight rows of different lengths with a weight for every response token."""
    generator = torch.Generator().manual_seed(3)

    def sample(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    prompts = [sample(1, 7) for _ in range(8)]
    responses = [sample(1, 16) for _ in range(8)]
    return Rows(
        input_ids=[torch.randint(2, 128, (p + r,), generator=generator) for p, r in zip(prompts, responses)],
        prompt_lengths=prompts,
        # around 2: a loss whose terms cancel would show nothing but rounding
        columns={"weights": [2.0 + torch.randn(r, generator=generator) for r in responses]},
    )


def weighted_loss(inputs: LossInputs) -> LossOutput:
    """-(w log p + 0.1 H) over response tokens: shows tokens that are shifted, doubled or lost."""
    log_probs, entropy = inputs.outputs
    per_token = -(log_probs * inputs.columns["weights"] + 0.1 * entropy)
    mask = inputs.mask
    return LossOutput((per_token * mask).sum(), mask.sum(), PendingMetrics({"loss": masked_mean(per_token, mask)}))


@contextlib.contextmanager
def engine_of(setting: Setting) -> Iterator[TrainEngine]:
    """An engine in training, in a world of its own; collective."""
    config = MegatronConfig(**KEYS | setting.keys)
    parallel.init_process_group(parallel.RankInfo.from_env(), 60)
    try:
        plan = plan_model(config, setting.folder)
        parallel._init_model_parallel(config, plan.layout.vpp, 60)
        parallel._seed_all(1)
        model = build_model(config, plan, trainable=True)
        load_weights(model, HfFolder(setting.folder))
        shape = batch_shape(
            config,
            packed=setting.packed,
            pad_id=0,
            shares_prefixes=setting.shares_prefixes,
            vision=plan.model_config.vision,
            num_predictions=plan.model_config.mtp_num_layers,
        )
        engine = TrainEngine(config, model, shape, temperature=TEMPERATURE)
        engine.start_training(1)
        yield engine
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def my_rows(rows: Rows) -> Rows:
    """This data-parallel rank's share: every n-th row."""
    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return rows.select(range(first, len(rows), step))


def full_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names; collective."""
    return {name: tensor.clone() for name, tensor in WeightStream(engine.model).named_tensors()}


def summary(results: list[StepResult], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a rank reports; whole weights from one rank only."""
    return {
        "metrics": [result.metrics for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "lr": [result.lr for result in results],
        "weights": {name: tensor.float().cpu().numpy() for name, tensor in weights.items()} if dist.get_rank() == 0 else None,
    }


def train(setting: Setting, steps: int = 5, at_once: bool = False) -> dict[str, Any]:
    """Trains and reports each step's metrics and gradient norm, and the weights at the end.

    Args:
        at_once: each step is told that another one follows, but the last.
    """
    with engine_of(setting) as engine:
        rows = my_rows(all_rows())
        results = [
            engine.train_step(rows, setting.batching, weighted_loss, has_next=at_once and step + 1 < steps)
            for step in range(steps)
        ]
        return summary(results, full_weights(engine))


def forward(setting: Setting) -> dict[int, tuple[Any, Any]]:
    """Log-probs and entropies by row, of this rank's rows; empty off the last pipeline stage."""
    with engine_of(setting) as engine:
        mine = range(parallel_state.get_data_parallel_rank(), 8, parallel_state.get_data_parallel_world_size())
        output = engine.forward(my_rows(all_rows()), setting.batching)
        return {} if output is None else {row: (a.cpu().numpy(), b.cpu().numpy()) for row, a, b in zip(mine, *output)}


class _ProductsByToken(TorchDispatchMode):
    """Counts batched products of which each has one row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and args[0].size(1) == 1:
            self.count += 1
        return func(*args, **(kwargs or {}))


def products_by_token(setting: Setting) -> int:
    """How many products of a frozen model's pass over one packed micro-batch go token by token."""
    with engine_of(setting) as engine, _ProductsByToken() as products:
        for model in engine.model.models:
            model.requires_grad_(False)
        engine.forward(all_rows(), setting.batching)
        return products.count

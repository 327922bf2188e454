"""The loop of `test_service.py` by `mindspeed_rl.Trainer` in this process: losses, log-probs, norms and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ranks import rank_settings, report


def main() -> None:
    """Settings: folder (has server.yaml), data (tokens of each pass), sampled (prompt and settings of the samples)."""
    settings = rank_settings()
    folder = Path(settings["folder"])
    from mindspeed_rl import Trainer
    from mindspeed_rl.service.backend import Datum

    seen: list[Any] = []
    with Trainer(folder / "server.yaml", rank=settings["rank"], seed=settings["seed"]) as trainer:

        def compute(tokens: list[int], *, forward_only: bool = False) -> None:
            inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
            call = trainer.forward if forward_only else trainer.forward_backward
            result = call([Datum(tokens[:-1], inputs)])
            seen.append([result.metrics["loss:sum"], result.outputs[0]["logprobs"].tolist()])

        for tokens in settings["data"]:
            compute(tokens)
            seen.append(dict(trainer.optim_step(settings["learning_rate"])))
        (samples,) = trainer.sample([settings["prompt"]], **settings["sampled"])
        # the service sends float32
        seen.append([[list(sample.tokens), np.array(sample.log_probs, np.float32).tolist()] for sample in samples])
        compute(settings["data"][0], forward_only=True)
        report(seen)


if __name__ == "__main__":
    main()

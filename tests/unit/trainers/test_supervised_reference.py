"""SFT and preference training follow the same training written with transformers and plain torch, step by step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from supervised_samples import adamw, answers, instruction_row, log_probs, pair_row, write_columns
from torch.nn.functional import logsigmoid
from transformers import Qwen2ForCausalLM

from mindspeed_rl.data.datasets import UnpairedDataset
from mindspeed_rl.workers.supervised_worker import SupervisedWorker

STEPS, BATCH, LR, MIN_LR, DECAY = 30, 8, 1e-3, 1e-4, 0.1


def cosine(step: int) -> float:
    """Learning rate of a step, the first being 0."""
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * step / STEPS)) * (LR - MIN_LR)


def batches(items: list) -> Iterator[list]:
    """File order, over and over."""
    for first in range(0, STEPS * BATCH, BATCH):
        yield [items[number % len(items)] for number in range(first, first + BATCH)]


def train_plainly(
    folder: Path, items: list, loss: Callable[[torch.nn.Module, list], torch.Tensor]
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step with transformers and torch."""
    model = Qwen2ForCausalLM.from_pretrained(folder).float().train()
    optimizer = adamw(model, LR, DECAY)
    curve = []
    for step, batch in enumerate(batches(items)):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step)
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append((value.item(), norm.item()))
    return curve


def train_here(stage: SupervisedWorker) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step with the engine."""
    results = [stage.train().metrics.results() for _ in range(STEPS)]
    return [(result["train/loss"], result["train/grad_norm"]) for result in results]


KEYS = {"lr": LR, "min_lr": MIN_LR, "lr_decay_style": "cosine", "weight_decay": DECAY, "train_iters": STEPS}


@pytest.mark.parametrize(
    "rl_config", [None, {"use_remove_padding": True, "use_dynamic_bsz": True, "max_packing_token_size": 64}]
)
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_follows_transformers(
    start: Callable, tiny_model: Path, tmp_path: Path, rl_config: dict | None, loss_type: str
) -> None:
    samples = answers(50, seed=1)
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in samples])

    def loss(model: torch.nn.Module, batch: list) -> torch.Tensor:
        learnt = [log_probs(model, prompt + answer)[len(prompt) - 1 :] for prompt, answer in batch]
        tokens = torch.cat(learnt)
        weights = tokens.detach().exp() if loss_type == "dft" else torch.ones_like(tokens)
        return -(weights * tokens).mean()

    expected = train_plainly(tiny_model, samples, loss)
    keys = {**KEYS, "sft_loss_type": loss_type, "reset_attention_mask": rl_config is not None}
    result = train_here(start("sft", prefix, rl_config=rl_config, **keys))
    assert torch.allclose(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert loss_type == "dft" or expected[-1][0] < expected[0][0] - 0.5  # there was something to follow


def test_dpo_follows_transformers(start: Callable, tiny_model: Path, tmp_path: Path) -> None:
    samples = [(prompt, chosen, rejected) for (prompt, chosen), (_, rejected) in zip(answers(50, seed=2), answers(50, seed=3))]
    prefix = write_columns(tmp_path / "pairs", [pair_row(*sample) for sample in samples])
    reference = Qwen2ForCausalLM.from_pretrained(tiny_model).float().eval()

    def answer(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        return log_probs(model, prompt + tokens)[len(prompt) - 1 :].sum()

    def loss(model: torch.nn.Module, batch: list) -> torch.Tensor:
        losses = []
        for prompt, chosen, rejected in batch:
            with torch.no_grad():
                tie = answer(reference, prompt, chosen) - answer(reference, prompt, rejected)
            z = answer(model, prompt, chosen) - answer(model, prompt, rejected) - tie
            losses.append(-0.9 * logsigmoid(0.2 * z) - 0.1 * logsigmoid(-0.2 * z))
        return torch.stack(losses).mean()

    expected = train_plainly(tiny_model, samples, loss)
    stage = start("dpo", prefix, dpo_beta=0.2, dpo_label_smoothing=0.1, **KEYS)
    result = train_here(stage)
    assert torch.allclose(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert expected[0][0] == pytest.approx(math.log(2), abs=1e-6) and expected[-1][0] < 0.6

    # the same bits where the reference comes layer by layer
    streamed = start("dpo", prefix, dpo_beta=0.2, dpo_label_smoothing=0.1, stream_ref_weights=True, **KEYS)
    assert streamed.resident_bytes()["reference"] == 0 < stage.resident_bytes()["reference"]
    assert train_here(streamed) == result
    assert streamed.resident_bytes()["reference"] == 0


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        ("dpo", {"dpo_loss_type": "hinge", "dpo_beta": 0.3, "pref_ftx": 0.5}),
        ("dpo", {"dpo_loss_type": "ipo", "dpo_beta": 0.3}),
        ("simpo", {"simpo_beta": 2.0, "gamma_beta_ratio": 0.5, "pref_ftx": 0.2}),
        ("cpo", {"cpo_beta": 0.3, "cpo_alpha": 0.7}),
        ("orpo", {"orpo_lambda": 0.4}),
    ],
)
def test_other_preference_losses_start_and_move_as_their_formulas_say(
    start: Callable, tiny_model: Path, tmp_path: Path, stage: str, keys: dict
) -> None:
    samples = [(prompt, chosen, rejected) for (prompt, chosen), (_, rejected) in zip(answers(16, seed=4), answers(16, seed=5))]
    prefix = write_columns(tmp_path / "pairs", [pair_row(*sample) for sample in samples])
    model = Qwen2ForCausalLM.from_pretrained(tiny_model).float()
    reference = copy.deepcopy(model).eval()

    def loss(batch: list) -> torch.Tensor:
        losses = []
        for prompt, *sides in batch:
            policy = [log_probs(model, prompt + side)[len(prompt) - 1 :].sum() for side in sides]
            tie = [log_probs(reference, prompt + side)[len(prompt) - 1 :].sum().detach() for side in sides]
            (chosen, rejected), beta = policy, keys.get("dpo_beta")
            if stage == "simpo":
                z = chosen / len(sides[0]) - rejected / len(sides[1]) - keys["gamma_beta_ratio"]
                value = -logsigmoid(keys["simpo_beta"] * z)
            elif stage == "cpo":
                value = -logsigmoid(keys["cpo_beta"] * (chosen - rejected)) - keys["cpo_alpha"] * chosen / len(sides[0])
            elif stage == "orpo":
                p, q = (chosen / len(sides[0])).exp(), (rejected / len(sides[1])).exp()
                odds = (p / (1 - p)).log() - (q / (1 - q)).log()
                value = -p.log() - keys["orpo_lambda"] * logsigmoid(odds)
            elif keys["dpo_loss_type"] == "ipo":
                z = (chosen - tie[0]) / len(sides[0]) - (rejected - tie[1]) / len(sides[1])
                value = (z - 1 / (2 * beta)) ** 2
            else:
                value = (1 - beta * (chosen - rejected - tie[0] + tie[1])).clamp(min=0)
            losses.append(value - keys.get("pref_ftx", 0.0) * chosen / len(sides[0]))
        return torch.stack(losses).mean()

    trained = start(stage, prefix, weight_decay=0.0, **keys)
    optimizer = adamw(model, 1e-3, 0.0)
    for first in (0, 8):
        optimizer.zero_grad()
        value = loss(samples[first : first + 8])
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result = trained.train().metrics.results()
        assert result["train/loss"] == pytest.approx(value.item(), rel=1e-4)
        assert result["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_moves_as_its_formula_says(start: Callable, tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    samples = answers(16, seed=6)
    judged = [(*sample, bool(index % 3)) for index, sample in enumerate(samples)]
    rows = [{**instruction_row(prompt, answer), "desirable": [int(good)]} for prompt, answer, good in judged]
    prefix = write_columns(tmp_path / "judged", rows)
    items = UnpairedDataset(prefix, seed=1234)
    lent = [items[index]["mismatched_input_ids"].tolist() for index in range(16)]
    model = Qwen2ForCausalLM.from_pretrained(tiny_model).float()
    reference, beta = copy.deepcopy(model).eval(), 0.4

    def ratio(prompt: list[int], ids: list[int]) -> torch.Tensor:
        ours, theirs = (log_probs(network, ids)[len(prompt) - 1 :].sum() for network in (model, reference))
        return ours - theirs.detach()

    trained = start("kto", prefix, weight_decay=0.0, kto_loss_type=loss_type, kto_beta=beta, kto_undesirable_weight=0.6)
    optimizer = adamw(model, 1e-3, 0.0)
    for first in (0, 8, 0):
        batch = list(zip(judged, lent))[first : first + 8]
        optimizer.zero_grad()
        kl = sum(ratio(prompt, ids).item() for (prompt, _, _), ids in batch) / 8 if loss_type == "kto" else 0.0
        kl, losses = max(kl, 0.0), []
        for (prompt, answer, good), _ in batch:
            r = ratio(prompt, prompt + answer)
            losses.append(1 - torch.sigmoid(beta * (r - kl)) if good else 0.6 * (1 - torch.sigmoid(beta * (kl - r))))
        value = torch.stack(losses).mean()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result = trained.train().metrics.results()
        assert result["train/loss"] == pytest.approx(value.item(), rel=1e-4)
        assert result["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert result["train/kl"] == pytest.approx(kl, rel=1e-3, abs=2e-5)

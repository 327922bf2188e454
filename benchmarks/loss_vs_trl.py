"""Hold our GRPO family against TRL's on the same batch with fixed responses.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -e . -r benchmarks/requirements-trl.txt
    /tmp/trl/bin/python benchmarks/loss_vs_trl.py [--output results.md]

TRL's own GRPOTrainer scores the fixed responses, computes advantages, old, reference and current log-probs with a tiny random
model, and its loss. The log-probs and rewards are saved as a rollout batch and go through `mindspeed-rl parity`. Loss,
advantages and the gradient with respect to the log-probs must agree to 1e-5 wherever the settings match. The last rows leave
one setting unmatched each; they must differ, and name the cause and the row above in which that cause is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import transformers
import trl
from datasets import Dataset
from headline import Headline
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli import parity

TOLERANCE = 1e-5
VOCABULARY, GROUP, PROMPTS, MAX_LENGTH = 64, 4, 3, 12
ROWS = GROUP * PROMPTS


@dataclass(frozen=True)
class Case:
    """One setting of TRL and what says the same in our run file.

    Attributes:
        trl: arguments of GRPOConfig.
        ours: keys of rl_config, beside those in COMMON.
        cause: why the two differ; empty where they must agree.
        without: the case that agrees because this cause is gone.
        engine: rollout log-probs differ from the trainer's, and TRL corrects for it.
        components: two reward functions instead of one.
    """

    name: str
    trl: dict[str, Any]
    ours: dict[str, Any]
    cause: str = ""
    without: str = ""
    engine: bool = False
    components: bool = False


# Both sides: std + 1e-4, no KL clamp, no KL and no correction of it unless the case says so.
BASE = {"beta": 0.0, "use_bias_correction_kl": False}
COMMON = {"adv_epsilon": 1e-4, "kl_clamp": False, "init_kl_coef": 0.0, "loss_type": "grpo"}
HIGHER = {"clip_higher_enable": True, "clip_ratio_low": 0.2}
CASES = [
    Case("grpo", {"loss_type": "grpo"}, {}),
    Case("grpo, KL k3", {"loss_type": "grpo", "beta": 0.1}, {"init_kl_coef": 0.1}),
    Case(
        "grpo, bias-corrected KL",
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        {"init_kl_coef": 0.1, "use_bias_correction_kl": True},
    ),
    Case("bnpo, one micro-batch", {"loss_type": "bnpo", "beta": 0.1}, {"loss_type": "bnpo", "init_kl_coef": 0.1}),
    Case("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Case(
        "dapo, clip higher",
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dapo", "clip_ratio_high": 0.28} | HIGHER,
    ),
    Case(
        "dapo, overlong filter",
        {"loss_type": "dapo", "mask_truncated_completions": True},
        {"loss_type": "dapo", "overlong_filter": True},
    ),
    Case("grpo, overlong filter", {"loss_type": "grpo", "mask_truncated_completions": True}, {"overlong_filter": True}),
    Case("batch std", {"loss_type": "grpo", "scale_rewards": "batch"}, {"scale_rewards": "batch"}),
    Case(
        "gdpo, two rewards",
        {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
        {"adv_estimator": "gdpo"},
        components=True,
    ),
    Case(
        "gspo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"loss_type": "gspo", "clip_ratio": 0.05},
    ),
    Case(
        "cispo with a cap",
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "cispo_cap", "clip_ratio_high": 1.1} | HIGHER,
    ),
    Case(
        "gspo, KL",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "beta": 0.1},
        {"loss_type": "gspo", "clip_ratio": 0.05, "init_kl_coef": 0.1},
    ),
    Case("sapo", {"loss_type": "sapo"}, {"loss_type": "sapo"}),
    Case("two-sided delta", {"loss_type": "grpo", "delta": 1.25}, {"delta": 1.25}),
    Case("delta as dual clip", {"loss_type": "grpo", "delta": 1.25}, {"clip_ratio_c": 1.25}),
    Case("opsm", {"loss_type": "grpo", "off_policy_mask_threshold": 0.01}, {"off_policy_sequence_mask_delta": 0.01}),
    Case("top-entropy tokens", {"loss_type": "grpo", "top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.3}),
    Case("entropy bonus, dapo", {"loss_type": "dapo", "entropy_coef": 0.1}, {"loss_type": "dapo", "entropy_coeff": 0.1}),
] + [
    Case(
        f"rollout correction {mode}, KL",
        {"loss_type": "dapo", "beta": 0.1, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.05},
        {
            "loss_type": "dapo",
            "init_kl_coef": 0.1,
            "rollout_importance_sampling_mode": mode,
            "rollout_importance_sampling_threshold": 1.05,
        },
        engine=True,
    )
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
]
DIFFERENCES = [
    Case("std epsilon", {"loss_type": "grpo"}, {"adv_epsilon": 1e-6}, "our default adds 1e-6 to the std, TRL 1e-4", "grpo"),
    Case(
        "default KL",
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        {"init_kl_coef": 0.1},
        "use_bias_correction_kl is off here and on in TRL by default",
        "grpo, bias-corrected KL",
    ),
    Case(
        "KL clamp",
        {"loss_type": "grpo", "beta": 0.1},
        {"init_kl_coef": 0.1, "kl_clamp": True},
        "kl_clamp limits low_var_kl to 10 as MindSpeed-RL does, TRL never",
        "grpo, KL k3",
    ),
    Case(
        "normalizer",
        {"loss_type": "grpo"},
        {"loss_type": "dapo"},
        "mean over sequences against mean over the tokens of the global batch, the default of stage ray_grpo",
        "dapo, clip higher",
    ),
    Case(
        "cispo",
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "cispo", "clip_ratio_high": 0.1} | HIGHER | {"clip_ratio_low": 0.1},
        "cispo clips to 1 - eps .. 1 + eps as in its paper, TRL's has an absolute cap and no lower bound (cispo_cap)",
        "cispo with a cap",
    ),
    Case(
        "entropy bonus, grpo",
        {"loss_type": "grpo", "entropy_coef": 0.1},
        {"entropy_coeff": 0.1},
        "our entropy term shares the loss's normalizer, TRL's is always a mean over tokens",
        "entropy bonus, dapo",
    ),
    Case(
        "bias-corrected KL, sequence ratio",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
        {"loss_type": "gspo", "init_kl_coef": 0.1, "use_bias_correction_kl": True},
        "ours weighs the KL of a token with the token's ratio at every level, TRL with the ratio of the loss",
        "gspo, KL",
    ),
]


@dataclass
class Fixed:
    """The responses and scores that both sides get."""

    prompts: list[list[int]]
    completions: list[list[int]]
    engine_log_probs: list[list[float]]
    rewards: list[list[float]]


def fixed_batch(seed: int) -> Fixed:
    """Return prompts, ragged responses (some truncated: without the end token 1), and two scores each."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [tokens(3 + i) for i in range(PROMPTS)]
    completions = []
    for _ in range(ROWS):
        length = int(torch.randint(1, MAX_LENGTH, (1,), generator=generator))
        completions.append([*tokens(length), 1] if torch.rand((), generator=generator) < 0.7 else tokens(MAX_LENGTH))
    rewards = torch.rand(ROWS, 2, generator=generator).round(decimals=2).tolist()
    noise = [(0.1 * torch.randn(len(c), generator=generator)).tolist() for c in completions]
    return Fixed([p for p in prompts for _ in range(GROUP)], completions, noise, rewards)


def tiny_model(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tiny random Qwen2 and its word-level tokenizer into the folder; return the tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def nudge(model: torch.nn.Module, amount: float, seed: int) -> None:
    """Move all weights a little, so that old, current and reference policies differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += amount * torch.randn(weight.shape, generator=generator)


@dataclass
class Outcome:
    """Loss, advantages [B, R] and gradient of the loss by the log-probs [B, R]."""

    loss: float
    advantages: torch.Tensor
    gradients: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


def run_trl(case: Case, fixed: Fixed, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Outcome:
    """Return what TRL computes, with the columns of the rollout batch it computed it from."""
    scorers = [lambda score_a, **_: score_a, lambda score_b, **_: score_b]
    for name, scorer in zip("ab", scorers):
        scorer.__name__ = f"score_{name}"
    arguments = GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        max_completion_length=MAX_LENGTH,
        num_iterations=2,  # makes TRL keep the old log-probs
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_dropout=True,
        **(BASE | case.trl),
    )
    examples = [{"prompt": f"p{i // GROUP}", "score_a": a, "score_b": b} for i, (a, b) in enumerate(fixed.rewards)]

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        return {"prompt_ids": fixed.prompts, "completion_ids": fixed.completions, "logprobs": engine_log_probs}

    trainer = GRPOTrainer(
        model=str(folder),
        args=arguments,
        reward_funcs=scorers if case.components else scorers[:1],
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    if trainer.ref_model is not None:
        nudge(trainer.ref_model, 0.08, seed=1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    engine_log_probs = fixed.engine_log_probs
    inputs = trainer._generate_and_score_completions(examples)
    mask = inputs["completion_mask"].bool()
    if case.engine:
        # the engine's log-probs are the trainer's plus noise; TRL then computes its correction from them
        old = inputs["old_per_token_logps"]
        engine_log_probs = [
            [old[i, t].item() + noise for t, noise in enumerate(row)] for i, row in enumerate(fixed.engine_log_probs)
        ]
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        inputs = trainer._generate_and_score_completions(examples)
    else:
        inputs.pop("sampling_per_token_logps", None)
    nudge(trainer.model, 0.01, seed=2)

    seen: dict[str, torch.Tensor] = {}
    original = trainer._get_per_token_logps_and_entropies

    def watched(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        log_probs, entropies, extra = original(*args, **kwargs)
        # a leaf, so that the gradient is the loss's own and not the model's
        seen["log_probs"] = log_probs.detach().clone().requires_grad_()
        seen["entropy"] = entropies.detach()
        return seen["log_probs"], seen["entropy"], extra

    trainer._get_per_token_logps_and_entropies = watched
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()

    lengths = torch.tensor([len(completion) for completion in fixed.completions])
    response_mask = torch.arange(mask.shape[1]) < lengths.unsqueeze(1)
    columns = {
        "response_mask": response_mask,
        "truncated": torch.tensor([completion[-1] != 1 for completion in fixed.completions]),
        "rewards": torch.tensor([row[0] for row in fixed.rewards]),
        "reward_components": torch.tensor(fixed.rewards),
        "log_probs": seen["log_probs"],
        "old_log_probs": inputs["old_per_token_logps"],
        "entropy": seen["entropy"],
    }
    if "ref_per_token_logps" in inputs:
        columns["ref_log_probs"] = inputs["ref_per_token_logps"]
    if case.engine:
        columns["rollout_log_probs"] = inputs["sampling_per_token_logps"]
    advantages = inputs["advantages"].unsqueeze(1) * response_mask
    return Outcome(loss.item(), advantages, seen["log_probs"].grad, columns)


def run_ours(case: Case, columns: dict[str, torch.Tensor], folder: Path, dtype: str) -> Outcome:
    """Return what `mindspeed-rl parity` writes for the batch."""
    path = folder / "batch.safetensors"
    RolloutBatch(columns, GROUP, MAX_LENGTH, "ray_grpo", COMMON | case.ours).save(path)
    output = folder / "parity.safetensors"
    with contextlib.redirect_stdout(io.StringIO()):
        status = parity.main([str(path), "--dtype", dtype, "--output", str(output)])
    if status:
        raise SystemExit(f"{case.name}: the replay failed")
    tensors = load_file(output)
    return Outcome(json.loads(output.with_suffix(".json").read_text())["loss"], tensors["advantages"], tensors["gradients"])


def main() -> int:
    """Print the table; return 1 when a case that must agree does not, or a named cause does not show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="precision of our replay")
    parser.add_argument("--output", type=Path, default=None, help="also write the table here, as Markdown")
    arguments = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    lines = [
        f"TRL {trl.__version__}, torch {torch.__version__}, {ROWS} responses. d: largest difference, {TOLERANCE:g} is allowed",
        "",
        "| case | loss, TRL | loss, ours | d loss | d advantages | d gradients | |",
        "|---|---|---|---|---|---|---|",
    ]
    failures, agreeing, largest = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = tiny_model(folder)
        for case in CASES + DIFFERENCES:
            theirs = run_trl(case, fixed_batch(seed=0), folder, tokenizer)
            ours = run_ours(case, theirs.columns, folder, arguments.dtype)
            gaps = (
                abs(ours.loss - theirs.loss),
                (ours.advantages - theirs.advantages).abs().max().item(),
                (ours.gradients - theirs.gradients).abs().max().item(),
            )
            agree = max(gaps) <= TOLERANCE
            if not case.cause:
                agreeing, largest = agreeing + agree, max(largest, *gaps)
            failures += agree == bool(case.cause)
            verdict = "agrees" if agree else f"{case.cause}; gone in: {case.without}" if case.cause else "DIFFERS"
            if case.cause and agree:
                verdict = f"NO DIFFERENCE SEEN, expected: {case.cause}"
            numbers = " | ".join(f"{gap:.1e}" for gap in gaps)
            lines.append(f"| {case.name} | {theirs.loss:.7f} | {ours.loss:.7f} | {numbers} | {verdict} |")
    table = "\n".join(lines)
    print(table)
    Headline(
        f"settings of {len(CASES)} in which losses and gradients agree", str(agreeing), "TRL", f"gaps to {largest:.1e}"
    ).say()
    if arguments.output:
        arguments.output.write_text(table + "\n", encoding="utf-8")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Stage sft on stored log-probs of a teacher, against torch on transformers' logits; and the command that stores them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from supervised_samples import VOCAB, answers, instruction_row, text, write_columns
from teachers import TeacherHandler
from torch.distributions import Categorical, kl_divergence
from transformers import Qwen2ForCausalLM

from mindspeed_rl.cli.teacher_log_probs import main
from mindspeed_rl.data.datasets import StoredLogProbs

SAMPLES = answers(8, seed=4)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(tiny_model).float().eval()


@torch.no_grad()
def logits_of(model: Qwen2ForCausalLM, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, :, :VOCAB]


def teach(logits: torch.Tensor) -> torch.Tensor:
    """The teacher's log-probs where the student has these logits."""
    return (logits.flip(-1) * 3.0 + logits).log_softmax(-1)


@pytest.fixture
def server(model: Qwen2ForCausalLM) -> Iterator[str]:
    """The teacher as a server with vLLM's completions."""

    class Handler(TeacherHandler):
        def complete(self, ids: list[int], count: int) -> list[dict[str, Any] | None]:
            entries: list[dict[str, Any] | None] = [None]
            for token, row in zip(ids[1:], teach(logits_of(model, ids))):
                chosen = dict.fromkeys([*row.topk(count).indices.tolist(), token])
                words = {item: text(item) if 3 <= item < 97 else "\ufffd" for item in chosen}
                entries.append({str(item): {"logprob": row[item].item(), "decoded_token": words[item]} for item in chosen})
            return entries

    started = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{started.server_address[1]}/v1"
    started.shutdown()


def store(prefix: Path, model: Path, server: str, top_k: int) -> int:
    overrides = {
        "megatron_training.data_path": prefix,
        "megatron_training.eval_data_path": "null",
        "megatron_training.tokenizer_name_or_path": model,
        "megatron_training.seq_length": 64,
        "actor_config.load": model,
        "model.tiny_qwen25.num_layers": "null",
    }
    words = [f"{name}={value}" for name, value in overrides.items()]
    return main(["--config-name", "sft_tiny_cpu", "--server", server, "--topk", str(top_k), *words])


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_the_loss_over_the_full_vocabulary_is_the_divergence_from_the_teacher(
    start: Callable[..., Any], model: Qwen2ForCausalLM, tiny_model: Path, server: str, tmp_path: Path, kind: str
) -> None:
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in SAMPLES])
    assert store(prefix, tiny_model, server, VOCAB) == 0
    result = start("sft", prefix, sft_loss_type=kind).train().metrics.results()
    expected = []
    for prompt, answer in SAMPLES:
        logits = logits_of(model, prompt + answer)[len(prompt) - 1 : -1]
        student, teacher = Categorical(logits=logits), Categorical(logits=teach(logits))
        expected.append(kl_divergence(*((teacher, student) if kind == "forward_kl" else (student, teacher))))
    assert result["train/loss"] == pytest.approx(torch.cat(expected).mean().item(), rel=1e-4)
    assert result["train/teacher_mass"] == pytest.approx(1.0, rel=1e-5)


def test_the_teacher_s_top_tokens_are_stored(model: Qwen2ForCausalLM, tiny_model: Path, server: str, tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in SAMPLES])
    assert store(prefix, tiny_model, server, 5) == 0
    stored = StoredLogProbs(prefix)
    for index, (prompt, answer) in enumerate(SAMPLES):
        ids, log_probs = stored.row(index)
        best = teach(logits_of(model, prompt + answer)[len(prompt) - 1 : -1]).topk(5)
        np.testing.assert_allclose(log_probs, best.values.numpy(), rtol=1e-4, atol=1e-5)
        assert ids.tolist() == best.indices.tolist()


def test_log_probs_of_other_rows_are_refused(start: Callable[..., Any], tiny_model: Path, server: str, tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in SAMPLES])
    with pytest.raises(ValueError, match="mindspeed-rl teacher-log-probs"):
        start("sft", prefix, sft_loss_type="forward_kl")
    assert store(prefix, tiny_model, server, 3) == 0
    write_columns(prefix, [instruction_row(*sample) for sample in answers(8, seed=5)])
    with pytest.raises(ValueError, match="another seq_length or other packs; write them again"):
        start("sft", prefix, sft_loss_type="forward_kl").train()

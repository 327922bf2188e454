"""`--engine transformers`: greedy answers, log-probs and next tokens of transformers' own model, of any family that it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Qwen3MoeConfig

from mindspeed_rl.inference.engine_interface import Request, collect
from mindspeed_rl.inference.model_files import EngineSettings, ModelSettings, open_model
from mindspeed_rl.inference.module_text_engine import ModuleTextEngine
from mindspeed_rl.rollout.requests import Sampling

CONFIGS = {
    # of the table, with experts that the folder has one by one
    "qwen3_moe": Qwen3MoeConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    # of none, with a tied head
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
}
PROMPTS = [[5, 6, 7], [9]]


class Letters:
    """A tokenizer: each token is a character."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(60 + index) for index in ids)


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    made = tmp_path_factory.mktemp(request.param)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.mul_(4.0)
    model.save_pretrained(made)
    return made


def test_answers_scores_and_next_tokens_are_those_of_the_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = EngineSettings(ModelSettings(folder, by_module=True), str(folder), max_model_len=12, max_num_seqs=1)
    files = open_model(settings.model)
    engine = ModuleTextEngine(settings, files, Letters())  # type: ignore[arg-type]
    answers = collect(engine.stream([Request(prompt) for prompt in PROMPTS], Sampling(0.0, 6, ())), 2)
    for prompt, answer in zip(PROMPTS, answers):
        ids, total = list(prompt), 0.0
        for _ in range(6):
            with torch.no_grad():
                log_probs = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(log_probs.argmax()))
            total += float(log_probs.max())
        assert answer.token_ids == ids[len(prompt) :] and answer.log_prob == pytest.approx(total, abs=1e-4)
        assert answer.finish == "length"
        (scored,) = engine.score([ids], [len(prompt)])
        assert [is_most_likely for _, is_most_likely in scored] == [True] * 6
        assert sum(value for value, _ in scored) == pytest.approx(total, abs=1e-4)
        assert engine.next_tokens([prompt], 2)[0][0][0] == ids[len(prompt)]
        stop = Letters().decode(ids[len(prompt) : len(prompt) + 2])
        (cut,) = collect(engine.stream([Request(prompt)], Sampling(0.0, 6, ()), [stop]), 1)
        assert (cut.token_ids, cut.finish) == (ids[len(prompt) : len(prompt) + 2], "stop")
        (chosen,) = collect(engine.stream([Request(prompt, allowed_ids=(3, 4))], Sampling(1.0, 5, ())), 1)
        assert set(chosen.token_ids) <= {3, 4}
    engine.close()


def test_a_family_outside_of_the_table_is_not_opened_for_another_engine(folder: Path) -> None:
    if "bloom" in folder.name:
        with pytest.raises(ValueError, match="BloomForCausalLM"):
            open_model(ModelSettings(folder))

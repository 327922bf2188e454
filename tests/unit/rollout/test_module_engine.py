"""Transformers' own module as a rollout engine: tokens and log-probs of a plain computation, one response at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.models.hf_module import list_untaken
from mindspeed_rl.rollout.module_engine import ModuleEngine
from mindspeed_rl.rollout.requests import Completion, Sampling

_SIZES = {
    **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
}
SAMPLING = Sampling(0.8, 12, (1,))
PROMPTS = [(5, 6, 7), (5, 6, 7), (9, 10), (11,)]


@pytest.fixture(scope="module", params=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3Config(**_SIZES) if request.param == "dense" else Qwen3MoeConfig(**_SIZES, **experts)
    torch.manual_seed(3)
    made = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    return made


def _open(folder: Path, rows: int = 8) -> ModuleEngine:
    config = GenerateConfig(infer_tensor_parallel_size=1, max_num_seqs=rows, max_model_len=16, dtype="float32")
    engine = ModuleEngine(folder, config, SAMPLING)
    _load(engine, folder)
    return engine


def _load(engine: ModuleEngine, folder: Path, factor: float = 1.0, version: int = 0) -> None:
    engine.load_weights(((name, value * factor) for name, value in load_file(folder / "model.safetensors").items()), version)


def _run(engine: ModuleEngine, requests: dict[str, tuple[tuple[int, ...], int]], sampling: Sampling) -> dict[str, Completion]:
    for name, (prompt, seed) in requests.items():
        engine.add_request(name, prompt, sampling, seed)
    ended: dict[str, Completion] = {}
    while engine.has_unfinished():
        ended.update(engine.step())
    return ended


REQUESTS = {str(index): (prompt, 100 + index) for index, prompt in enumerate(PROMPTS)}


def test_tokens_are_sampled_from_the_model_s_own_distribution(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, completion in _run(_open(folder), REQUESTS, SAMPLING).items():
        prompt, seed = REQUESTS[name]
        generator, ids = torch.Generator().manual_seed(seed), list(prompt)
        for token, log_prob in zip(completion.token_ids, completion.log_probs):
            with torch.no_grad():  # the whole sequence anew, without a cache
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1] / 0.8
            assert token == int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            assert log_prob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)
            ids.append(token)
        assert completion.truncated == (ids[-1] != 1)
        # max_tokens 12, and 16 tokens with the prompt
        assert len(completion.token_ids) <= 12 and (ids[-1] == 1 or len(completion.token_ids) == min(12, 16 - len(prompt)))


def test_a_response_depends_on_no_other_request(folder: Path) -> None:
    together = _run(_open(folder), REQUESTS, SAMPLING)
    one_by_one = _run(_open(folder, rows=1), REQUESTS, SAMPLING)
    alone = {name: _run(_open(folder), {name: REQUESTS[name]}, SAMPLING)[name] for name in REQUESTS}
    assert together == one_by_one == alone
    assert together["0"].token_ids != together["1"].token_ids


def test_greedy_penalties_and_shortest_length_are_followed(folder: Path) -> None:
    greedy = Sampling(0.0, 6, (1,), repetition_penalty=50.0, min_tokens=6)
    (completion,) = _run(_open(folder), {"a": ((5, 6), 1)}, greedy).values()
    assert len({5, 6, *completion.token_ids}) == 8 and 1 not in completion.token_ids[:5]


def test_requests_are_aborted_with_the_tokens_that_they_have_and_frozen_ones_continue_with_other_weights(folder: Path) -> None:
    engine, whole = _open(folder), _run(_open(folder), REQUESTS, SAMPLING)
    for name, (prompt, seed) in REQUESTS.items():
        engine.add_request(name, prompt, SAMPLING, seed)
    assert not engine.step() and engine.partial_completion("3").token_ids == whole["3"].token_ids[:1]
    engine.abort(["0", "1", "2", "unknown"])
    _load(engine, folder, version=1)
    ended: dict[str, Completion] = {}
    while engine.has_unfinished():
        ended.update(engine.step())
    assert ended == {"3": whole["3"]} and engine.weight_version == 1
    with pytest.raises(ValueError, match=r"16 tokens.*generate_config.max_model_len \(16\)"):
        engine.check_request(16, SAMPLING)


def test_ends_that_need_a_text_are_refused_where_they_are_asked_for(folder: Path) -> None:
    engine = _open(folder)
    engine.check_request(5, SAMPLING)
    for changed, what in (({"stop": ("Observation:",)}, "stop texts"), ({"structured_output": '{"regex": "a"}'}, "a form")):
        with pytest.raises(ValueError, match=f"engine: transformers sees no text, and a request has {what}.*vllm"):
            engine.check_request(5, replace(SAMPLING, **changed))


def test_a_load_that_leaves_a_parameter_out_is_refused(folder: Path) -> None:
    engine, weights = _open(folder), load_file(folder / "model.safetensors")
    one = next(name for name in weights if name.endswith("down_proj.weight"))
    del weights[one]
    with pytest.raises(RuntimeError, match="down_proj"):
        engine.load_weights(iter(weights.items()), 1)


def test_names_that_a_module_does_not_take_are_found(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    assert list_untaken(folder, names, trusts_code=False) == []
    other = "model.layers.0.mlp.experts.up"
    assert list_untaken(folder, [*names, other], trusts_code=False) == [other]

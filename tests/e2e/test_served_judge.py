"""A generative judge that the run serves: its scores come from its model's own replies, on whatever devices it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, finished
from tiny_task import _SIZES, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

_REPLY = 12


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and its prompt template."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(7)
    Qwen2ForCausalLM(Qwen2Config(**_SIZES | {"tie_word_embeddings": False})).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "prompt.txt").write_text("{prompt}{response}/{label}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("place", ["the actor's devices", "dedicated devices"])
def test_a_score_is_that_of_the_models_greedy_reply(task: Path, judge: Path, tmp_path: Path, place: str) -> None:
    keys = [
        *ONE_PROCESS,
        f"+rl_config.judge_model={judge}",
        f"+rl_config.judge_prompt={judge / 'prompt.txt'}",
        "+rl_config.judge_parser=builtins:len",
        f"+rl_config.judge_max_tokens={_REPLY}",
        "+rl_config.judge_weight=0.01",
        "++rl_config.log_completions=true",
        "megatron_training.train_iters=2",
        f"megatron_training.eval_data_path={task / 'heldout.jsonl'}",
        "actor_config.save=null",
    ]
    if place == "dedicated devices":
        keys.append("+rl_config.judge_resource.num_npus=1")
    else:  # engine and training take turns in memory: the judge takes its turn in the middle of an evaluation
        keys.append("++generate_config.offload_train_param=true")
    run = finished(task, tmp_path, *keys)
    assert ("starting 1 workers and 1 for the judge" in run.output) is (place == "dedicated devices")
    assert (run.folder / "run" / "logs" / "judge_server_0.log").is_file()
    for record in run.metrics:
        assert {"judge_rewards/mean", "judge_rewards/agreement_with_exact_match", "timing/judge"} <= record.keys()
        assert 0 < record["judge/requests"] < 32  # equal responses to a prompt are one request
    assert "eval/judge" in run.metrics[-1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32), AutoTokenizer.from_pretrained(judge)
    for line in map(json.loads, (run.folder / "run" / "completions.jsonl").read_text().splitlines()[:8]):
        text = f"[{line['prompt']}{line['response'].removesuffix('<eos>')}/{line['prompt'][:2]}]"
        ids = tokenizer(text, return_tensors="pt").input_ids
        reply = model.generate(ids, max_new_tokens=_REPLY, do_sample=False, eos_token_id=1, pad_token_id=0)[0, ids.shape[1] :]
        assert line["parts"]["judge"] == len(tokenizer.decode(reply, skip_special_tokens=True)), text

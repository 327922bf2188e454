"""`evaluate --task lm-eval:NAME` on the rollout engine: what lm-eval finds with transformers, on the same files.

Needs lm-eval, which `bash envs/cpu/extras.sh` installs over the CPU environment; `tests/run.sh --all` does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import patient
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("lm_eval")
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "data"))
from byte_tokenizer import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORDS = "red green blue seven nine four cat dog bird".split()
HEAD = "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}} ="
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "tiny_answer": """
output_type: generate_until
doc_to_text: "{{question}} ="
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def make_model(folder: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer(eos_token="<|im_end|>")
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def greedy_answer(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, count: int) -> str:
    """What transformers answers, up to the end of the line."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    result = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(result, skip_special_tokens=True).split("\n")[0]


def test_tasks_of_lm_eval_find_what_they_find_with_transformers(tmp_path: Path) -> None:
    made = make_model(tmp_path / "hf")
    rng = random.Random(3)
    rows = []
    for number in range(24):
        question = " ".join(rng.choices(WORDS, k=rng.randint(2, 7)))
        # every third one has the answer that the model gives
        text = greedy_answer(*made, f"{question} =", 8) if number % 3 == 0 else "nothing"
        rows.append({"question": question, "choices": rng.sample(WORDS, 4), "answer": rng.randrange(4), "text": text})
    (tmp_path / "tasks").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(HEAD.format(name=name, rows=tmp_path / "rows.jsonl") + text)

    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "evaluate", "--load", str(tmp_path / "hf")]
    command += ["--task", *(f"lm-eval:{name}" for name in TASKS), "--task-data-path", *[str(tmp_path / "tasks")] * len(TASKS)]
    command += ["--max-length", "256", "--output", str(tmp_path / "scores.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(400))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "scores.json").read_text())["lm_eval"]  # what was asked for -> its tasks -> metrics
    ours = {name: result[name][name] for name in TASKS}

    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32", "max_length": 256},
        device="cpu",
        batch_size=1,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        bootstrap_iters=0,
        log_samples=False,
    )
    assert theirs is not None
    for name, metrics in (("tiny_choice", ("acc", "acc_norm")), ("tiny_text", ("word_perplexity", "byte_perplexity"))):
        for metric in metrics:
            assert ours[name][metric] == pytest.approx(theirs["results"][name][f"{metric},none"], rel=1e-4), (name, metric)
    assert 0 < ours["tiny_choice"]["acc"] < 1
    assert ours["tiny_answer"]["exact_match"] == theirs["results"]["tiny_answer"]["exact_match,none"] == pytest.approx(8 / 24)

"""Prompts that are never or always right are found from samples, and the file is one that the curriculum reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.audit.data import audit_data, write_clean, write_pass_rates
from mindspeed_rl.audit.pass_rates import Sampler, list_prompts, measure_pass_rates
from mindspeed_rl.audit.rows import AuditRow, open_run_data
from mindspeed_rl.cli.audit import main
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.data.prompts import open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.rewards.samples import RewardResult, RewardSample
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run.draft import draft
from mindspeed_rl.trainers.prompt_sampling import PromptOrder, build_prompt_sampler

#: prompt -> what four samples answer; the label is 7
ANSWERS = {"always": "7777", "never": "8888", "half": "7878", "once": "8788", "unscored": "????", "partly": "7?78"}


class Engine:
    """Answers each sample of a prompt by the table; a token is the code of a letter."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.seeds = tokenizer, list[int]()
        self._asked: dict[str, int] = {}

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Delta]:
        for index, request in enumerate(requests):
            prompt = self._tokenizer.decode(request.prompt_ids)
            name = next(name for name in ANSWERS if name in prompt)
            count = self._asked[name] = self._asked.get(name, -1) + 1
            self.seeds.append(request.seed)
            yield Delta(index, [ord(ANSWERS[name][count])], [-1.0], "stop")


class Scorer:
    def score(self, samples: Sequence[RewardSample], timeout_s: float | None = None) -> list[RewardResult]:
        failed = RewardResult(None, state="failed", error="no digit")
        return [failed if one.response == "?" else RewardResult(float(one.response == one.label)) for one in samples]


def read_sample(row: AuditRow, token_ids: list[int], is_cut: bool) -> RewardSample:
    return RewardSample(prompt=row.text, response="".join(map(chr, token_ids)), label=row.label)


@pytest.fixture
def measured(tmp_path: Path, tokenizer_folder: str) -> Callable[[int | None], tuple[Any, Any, Any, Engine]]:
    rows = [{"prompt": f"the {name} question", "labels": "7"} for name in ANSWERS] + [{"prompt": " ", "labels": "7"}]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"data_path": path, "tokenizer_name_or_path": tokenizer_folder, "eval_data_path": "null"}
    overrides = [f"megatron_training.{name}={value}" for name, value in keys.items()]
    run = draft(load_run_config("grpo_tiny_cpu", None, ["rl_config.max_prompt_length=200", *overrides]))
    tokenizer = load_tokenizer(tokenizer_folder)

    def measure(limit: int | None = None) -> tuple[Any, Any, Any, Engine]:
        train, held_out = open_run_data(run, tokenizer)
        engine = Engine(tokenizer)
        sampler = Sampler(engine, Sampling(1.0, 4, ()), read_sample, lambda ids: "".join(map(chr, ids)), Scorer(), 0.5, 1)
        rates = measure_pass_rates(list_prompts(train, run, limit), sampler, 4)
        audit = audit_data(train, held_out, run)
        audit.pass_rates = rates
        return rates, audit, train, engine

    return measure


def test_pass_rates_are_the_share_of_right_samples(measured: Callable[..., Any]) -> None:
    rates, audit, _, engine = measured()
    # rows by index: always, never, half, once, unscored (in no rate), partly (2 of 4); the empty row is not a prompt
    assert rates.rates == {0: 1.0, 1: 0.0, 2: 0.5, 3: 0.25, 5: 0.5}
    assert (rates.always, rates.never, rates.num_unscored) == ({0}, {1}, 1)
    assert len(set(engine.seeds)) == len(engine.seeds) == 24
    assert audit.encode(0.5)["pass_rates"]["never"] == 1 and "'8'" in rates.examples[0]
    assert "never right" in audit.describe(0.5).format()


def test_the_first_prompts_alone_may_be_measured(measured: Callable[..., Any]) -> None:
    assert set(measured(2)[0].rates) == {0, 1}


def test_the_file_orders_a_run_by_its_column(measured: Callable[..., Any], tmp_path: Path, tokenizer_folder: str) -> None:
    rates, _, train, _ = measured()
    path = tmp_path / "rates.jsonl"
    assert write_pass_rates(rates, train, path) == 5
    prompts = open_prompts(
        path, load_tokenizer(tokenizer_folder), max_prompt_length=200, dataset_additional_keys=["labels", "pass_rate"]
    )
    run = load_run_config("grpo_tiny_cpu", None, ["rl_config.prompt_curriculum=pass_rate"])
    sampler = build_prompt_sampler(PromptOrder.from_config(run.rl_config), prompts, seed=1, shuffle=False)
    assert sampler is not None
    order = [prompts[sampler.row(index)]["columns"]["pass_rate"] for index in range(5)]
    assert [float(rate) for rate in order] == [1.0, 0.5, 0.5, 0.25, 0.0]


def test_decided_prompts_are_left_out_on_request_with_the_reason(measured: Callable[..., Any], tmp_path: Path) -> None:
    rates, audit, train, _ = measured()
    decided = dict.fromkeys(rates.never, "never") | dict.fromkeys(rates.always, "always")
    columns = {index: {"pass_rate": rate} for index, rate in rates.rates.items()}
    assert write_clean(audit, train, tmp_path / "clean.jsonl", columns, decided) == (4, 3)
    kept = [json.loads(line) for line in (tmp_path / "clean.jsonl").read_text().splitlines()]
    assert [row.get("pass_rate") for row in kept] == [0.5, 0.25, None, 0.5]
    dropped = [json.loads(line) for line in (tmp_path / "clean.dropped.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in dropped] == [
        "all samples of the model are right", "no sample of the model is right", "empty prompt or label"
    ]  # fmt: skip
    # and stay without it
    assert write_clean(audit, train, tmp_path / "all.jsonl", columns) == (6, 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--samples", "4"], "--samples needs --model"),
        (["--model", "x", "--samples", "0"], "--samples 0 must be at least 1"),
        (["--model", "x", "--drop-decided"], "of --clean"),
        (["--pass-rates", "x.jsonl"], "--pass-rates needs --model"),
    ],
)
def test_options_that_do_nothing_are_refused(options: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "--config-name", "grpo_tiny_cpu", *options])
    assert sentence in capfd.readouterr().err

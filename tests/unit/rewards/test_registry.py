"""The registry: every entry can be used, and unknown names are loud."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards import ACCURACIES, REWARDS, find, register
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings, select_reward_functions
from mindspeed_rl.rewards.scorer import Scorer, ScorerError, import_scorer

SETTINGS = RewardSettings(soft_cache_length=10, judge_url="http://127.0.0.1:1/v1")
UPSTREAM = (
    "acc format step strict_format base_acc math_17k_acc acc_for_dapo acc_for_ppo math_verify_reward retool_reward".split()
)
MS_SWIFT = "accuracy format cosine repetition soft_overlong".split()


@pytest.mark.parametrize("name", sorted({*REWARDS, *UPSTREAM, *MS_SWIFT}))
def test_every_entry_can_be_imported_and_gives_one_number_for_a_sample(name: str) -> None:
    sample = RewardSample(
        prompt="1+1",
        response="2",
        response_ids=[5],
        label="2",
        columns={"pattern": ".*", "tests": ["assert True"], "data_source": "math"},
    )
    scorer = Scorer.build(name, import_scorer(name), SETTINGS)
    if scorer.is_async:
        return
    (value,) = scorer.to_values(scorer.call([sample], SETTINGS), 1)
    assert value is not None and name in value[0]


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_no_entry_breaks_on_an_empty_response(name: str) -> None:
    sample = RewardSample(label="2", columns={"pattern": ".*", "tests": ["assert True"], "data_source": "math"})
    scorer = Scorer.build(name, import_scorer(name), SETTINGS)
    if not scorer.is_async:
        scorer.to_values(scorer.call([sample], SETTINGS), 1)


@pytest.mark.parametrize(
    "name", "acc accuracy acc_for_dapo cosine exact_match gsm8k math_verify_reward multiple_choice".split()
)
def test_without_a_reference_answer_what_compares_with_one_fails_instead_of_scoring_zero(name: str) -> None:
    sample = RewardSample(response=r"\boxed{2}", response_ids=[5], label=None)
    with pytest.raises(ScorerError, match="its parameter '(label|solution)' is not a column of the dataset"):
        Scorer.build(name, import_scorer(name), SETTINGS).call([sample], SETTINGS)


def test_a_function_gets_response_and_answer_by_verls_names() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth and data_source == "mine"), "length": len(solution_str)}

    sample = RewardSample(response="42", response_ids=[5], label="42", columns={"data_source": "mine"})
    scorer = Scorer.build("own", compute_score, SETTINGS)
    assert scorer.to_values(scorer.call([sample], SETTINGS), 1) == [({"own": 1.0, "own/length": 2.0}, {})]


def test_a_function_of_openrlhf_gets_queries_and_returns_rewards() -> None:
    # reward_func(queries, prompts, labels) -> {"rewards", "scores", "extra_logs"}; a query is the prompt and the response
    def reward_func(queries, prompts, labels, **kwargs):
        rewards = [float(query[len(prompt) :] == label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]
        return {"rewards": torch.tensor(rewards), "scores": torch.zeros(len(rewards)), "extra_logs": {"x": 1}}

    samples = [RewardSample(prompt="2+40=", response=text, response_ids=[5], label="42", columns={}) for text in ("42", "43")]
    scorer = Scorer.build("own", reward_func, SETTINGS)
    assert scorer.to_values(scorer.call(samples, SETTINGS), 2) == [({"own": 1.0}, {}), ({"own": 0.0}, {})]


def test_without_a_reference_answer_other_functions_score() -> None:
    samples = [RewardSample(response="a b", response_ids=[5], label=None, columns={"tests": ["assert True"]})] * 2
    for name in ("format", "repetition", "soft_overlong", "code"):
        scorer = Scorer.build(name, import_scorer(name), SETTINGS)
        assert scorer.to_values(scorer.call(samples[:1], SETTINGS), 1) != [None]
    mine = Scorer.build("mine", lambda completions, label="none": [float(label == "none") for _ in completions], SETTINGS)
    assert mine.call(samples, SETTINGS) == [1.0, 1.0]
    with pytest.raises(ScorerError, match="its parameter 'labels'"):
        Scorer.build("mine", lambda completions, labels: [0.0] * len(labels), SETTINGS).call(samples, SETTINGS)


def test_an_unknown_name_is_answered_with_the_list_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match="unknown reward function 'acurracy'; did you mean 'accuracy'.*base_acc.*external_plugins"
    ):
        find("acurracy")


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="'acc' is already taken"):
        register("acc")(lambda response: 1.0)


def test_the_registry_loads_no_heavy_library() -> None:
    heavy = "torch transformers vllm ray sympy numpy".split()
    program = f"import sys, mindspeed_rl.rewards, mindspeed_rl.rewards.pool; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("returned", [None, 1, True, 0.5])
def test_a_number_or_nothing_is_a_score(returned: object) -> None:
    scorer = Scorer.build("x", lambda response: returned, SETTINGS)
    (value,) = scorer.to_values(scorer.call([RewardSample()], SETTINGS), 1)
    assert value is None if returned is None else value == ({"x": float(returned)}, {})


@pytest.mark.parametrize(
    "returned", ["1", [1.0], float("inf"), 1e39, -(10**400), {"a": 3e38, "b": 3e38}, {"a": "b", "c": float("nan")}, object()]
)
def test_anything_else_is_an_error(returned: object) -> None:
    with pytest.raises(ScorerError, match="not a finite number"):
        Scorer.build("x", lambda response: returned, SETTINGS).to_values(returned, 1)


ONE_FILE = """
def brief(response_ids, settings):
    return 1.0 - len(response_ids) / settings.max_tokens
"""


@pytest.mark.parametrize("form", ["external_plugins", "module:function", "registry"])
def test_a_reward_is_added_by_one_file_and_one_line(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registers = "from mindspeed_rl.rewards import register\n@register('brief')" if form == "external_plugins" else ""
    (tmp_path / "brief_reward.py").write_text(registers + ONE_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    if form == "registry":
        monkeypatch.setitem(REWARDS, "brief", "brief_reward:brief")  # the line of a built-in scorer
    lines = {
        "external_plugins": {"verifier_function": ["brief"], "external_plugins": [str(tmp_path / "brief_reward.py")]},
        "module:function": {"verifier_function": ["brief_reward:brief"]},
        "registry": {"verifier_function": ["brief"]},
    }[form]
    with RewardPool.from_config(RLConfig(verifier_weight=[2.0], num_reward_workers=1, **lines), max_tokens=8) as pool:
        (result,) = pool.score([RewardSample(response="ok", response_ids=[1, 2])])
    assert result.total == 2.0 * 0.75 and result.parts == {lines["verifier_function"][0]: 0.75}
    assert "brief_reward" not in sys.modules  # the pool's own process has no need of the file


def test_both_spellings_of_the_configuration_name_the_same_functions() -> None:
    assert select_reward_functions(RLConfig(verifier_function=["acc", "format"], verifier_weight=[1.0, 0.5])) == (
        ["acc", "format"],
        [1.0, 0.5],
    )
    assert select_reward_functions(RLConfig(rule_reward=False)) == ([], [])
    judged = RLConfig(verifier_function=["acc"], verifier_weight=[1.0], judge_url="http://127.0.0.1:1/v1", judge_weight=2.0)
    assert select_reward_functions(judged) == (["acc", "judge"], [1.0, 2.0])
    with pytest.raises(ValueError, match="verifier_function has 1 entries but verifier_weight has 2"):
        select_reward_functions(RLConfig(verifier_function=["acc"], verifier_weight=[1.0, 1.0]))


def test_settings_are_copied_from_the_configuration_and_derived_where_unset() -> None:
    settings = RewardSettings.from_config(
        RLConfig(verifier_timeout=7, verifier_parallel=3, repetition_n_grams=4), max_tokens=64
    )
    assert (settings.reward_timeout_s, settings.num_reward_workers, settings.repetition_n_grams) == (7.0, 3, 4)
    assert settings.max_tokens == 64
    assert RewardSettings.from_config(RLConfig(reward_timeout_s=0.5), max_tokens=64).reward_timeout_s == 0.5


def test_only_functions_that_say_whether_an_answer_is_right_are_accuracies(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from mindspeed_rl.rewards import register\n"
        "@register('right', is_accuracy=True)\ndef right(response):\n    return 1.0\n"
        "@register('long')\ndef long(response):\n    return 1.0\n"
        "@register('marked')\ndef marked(response):\n    return 1.0\n"
        "marked.is_accuracy = True\n"
    )
    functions = ["exact_match", "format", "right", "long", "marked", "repetition"]
    settings = RewardSettings(external_plugins=(str(plugin),))
    with RewardPool(functions, settings=settings) as pool:
        pool.check(RewardSample(response="2", response_ids=[5], label="2"))
        assert pool.accuracies == ["exact_match", "right", "marked"]
    assert ACCURACIES <= set(REWARDS)


def test_functions_in_the_form_of_easyr1_have_the_score_overall():
    def batch(reward_inputs, weight=0.1):
        scores = [weight * item["response_length"] for item in reward_inputs]
        seen = [item["ground_truth"] for item in reward_inputs]
        return [{"overall": score, "format": 1.0, "seen": label} for score, label in zip(scores, seen)]

    def single(reward_input):
        return {"overall": float(reward_input["response"] == reward_input["ground_truth"]), "format": 0.5}

    samples = [RewardSample(prompt="p", response="4", label=label, response_ids=[7, 8]) for label in ("4", "5")]
    of_batch, of_one = Scorer.build("batch", batch, SETTINGS), Scorer.build("single", single, SETTINGS)
    values = of_batch.to_values(of_batch.call(samples, SETTINGS), 2)
    assert [value[0]["batch"] for value in values if value] == [0.2, 0.2]
    assert values[0] is not None and values[0][1] == {"batch/seen": "4"}
    assert [of_one.to_values(of_one.call([sample], SETTINGS), 1)[0][0]["single"] for sample in samples] == [1.0, 0.0]

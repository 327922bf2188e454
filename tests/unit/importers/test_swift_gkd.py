"""GKD of ms-swift as on-policy distillation, and what of it has no place in a run with rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.swift import PROJECT
from mindspeed_rl.rewards import REWARDS

GKD = (
    "NPROC_PER_NODE=4 swift rlhf --rlhf_type gkd --model models/base --tuner_type full --dataset rows.jsonl --lmbda 1 "
    "--use_vllm true --vllm_mode colocate --max_steps 10 --gradient_accumulation_steps 2"
)
TEACHER = "--teacher_model models/teacher"
SERVER = "--teacher_model_server http://10.0.0.1:8000/ --gkd_logits_topk 64 --temperature 1"


def take(changes: str, base: str = GKD, folder: Path | None = None) -> Import:
    accepted = frozenset({"aggregation", "divergence"})
    return import_command(PROJECT, f"{base} {changes}", ImportSettings(rewards=REWARDS, accepted=accepted, folder=folder))


def fail(changes: str, base: str = GKD) -> str:
    with pytest.raises(ConfigError) as caught:
        import_command(PROJECT, f"{base} {changes}", ImportSettings(rewards=REWARDS))
    return "\n".join(caught.value.errors)


def keys(run: Import) -> dict[str, object]:
    found = run.tree["rl_config"]["distillation"]
    assert isinstance(found, dict)
    return found


def test_the_divergence_from_the_teacher_is_the_loss_of_single_responses() -> None:
    run = take(TEACHER)
    expected = {
        "enabled": True, "teacher_models": ["models/teacher"], "loss_mode": "jsd_topk", "beta": 0.5, "topk": 512,
        "topk_rest": "lump", "use_task_rewards": False,
    }  # fmt: skip
    assert keys(run) == expected
    rl = run.tree["rl_config"]
    names = ("n_samples_per_prompt", "rule_reward", "init_kl_coef", "loss_type")
    assert [rl[name] for name in names] == [1, False, 0.0, "bnpo"]
    assert run.get("generate_config.sampling_config.temperature") == 0.9
    assert run.plans is not None
    # 4 devices x 1 row x 2 passes
    assert [(plan.stage, plan.step_samples, plan.rollout_prompts, plan.total_steps) for plan in run.plans] == [
        ("ray_grpo", 8, 8, 10)
    ] * 2


def test_the_tokens_of_the_teacher_are_renormalized_where_ms_swift_reads_some_alone() -> None:
    run = take(f"{TEACHER} --gkd_logits_topk 64 --beta 1")
    assert [keys(run)[name] for name in ("topk", "topk_rest", "beta")] == [64, "renormalize", 1]
    assert run.plans is not None
    assert {plan.divergence for plan in run.plans} == {"jsd 1 over 64 tokens of the teacher, renormalized"}
    with pytest.raises(ConfigError, match="divergence would be .* is jsd 0.5 over the vocabulary in ms-swift"):
        import_command(PROJECT, f"{GKD} {TEACHER}", ImportSettings(accepted=frozenset({"aggregation"})))


def test_a_server_is_asked_at_temperature_one() -> None:
    run = take(SERVER)
    assert keys(run)["teacher_models"] == ["http://10.0.0.1:8000/v1"]
    assert keys(run)["teacher_temperature"] == 1.0
    assert "whose log-probs it divides" in fail(SERVER.replace("--temperature 1", "--temperature 0.7"))


@pytest.mark.parametrize(("teacher", "expected"), [("", "actor"), ("--teacher_model models/base", "models/base")])
def test_a_student_that_teaches_itself_reads_another_prompt(teacher: str, expected: str) -> None:
    run = take(teacher)
    assert keys(run)["teacher_models"] == [expected]
    assert keys(run)["teacher_prompt"] == "teacher_prompt"
    assert run.get("megatron_training.dataset_additional_keys") == ["teacher_prompt"]


def test_megatron_counts_rows_of_a_step() -> None:
    base = (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type gkd --model models/base --dataset rows.jsonl#1600 --lmbda 1 --vllm_mode "
        "colocate --micro_batch_size 2 --global_batch_size 16 --num_train_epochs 1 --tensor_model_parallel_size 2"
    )
    run = take(TEACHER, base)
    assert run.plans is not None
    assert [(plan.step_samples, plan.steps_per_rollout, plan.total_steps) for plan in run.plans] == [(16, 1, 100)] * 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (f"{TEACHER} --lmbda 0.5 --dataset AI-ModelScope/clevr_cogen_a_train", "responses of the data next to images"),
        (
            f"{TEACHER} --lmbda 0.5 --sft_alpha 0.1",
            "0.1 times the supervised loss at temperature 0.9 here, but is 0.5 of them by chance, the others are on the "
            "responses of the data, with 0.1 times the supervised loss at temperature 1 in ms-swift; --accept sampled_steps",
        ),
        (f"{TEACHER} --seq_kd true", "sequence distillation"),
        (f"{TEACHER} --teacher_adapters a", "a teacher with adapters"),
        (f"{SERVER} --dataset AI-ModelScope/clevr_cogen_a_train", "images for a teacher on a server"),
        (
            '--teacher_model_server \'[{"url": "http://a"}]\' --gkd_logits_topk 8',
            "several teachers that are not servers with a url and tags each",
        ),
        ('--teacher_model \'[{"model": "a", "tags": ["x"]}]\'', "several teachers that are not servers"),
    ],
)
def test_what_has_no_place_is_refused_by_name(options: str, sentence: str) -> None:
    assert sentence in fail(options)


def mixture(run: Import) -> list[object]:
    return [keys(run).get(name) for name in ("on_policy_fraction", "response_column", "supervised_coef")]


def test_half_of_the_steps_are_on_responses_of_the_data_unless_the_command_says_otherwise() -> None:
    base = GKD.replace("--lmbda 1", "--temperature 1")
    run = take(f"{TEACHER} --sft_alpha 0.1", base)
    assert mixture(run) == [0.5, "labels", 0.1]
    assert run.get("megatron_training.dataset_additional_keys") == ["labels"]
    assert run.plans is not None
    text = "{} of them by chance, the others are on the responses of the data{}"
    supervised = ", with 0.1 times the supervised loss at temperature 1"
    assert {plan.sampled_steps for plan in run.plans} == {text.format(0.5, supervised)}
    for share in ("0", "0.25"):
        run = take(f"{TEACHER} --lmbda {share}", base)
        assert mixture(run) == [float(share), "labels", None]
        assert run.plans is not None and {plan.sampled_steps for plan in run.plans} == {text.format(share, "")}
    assert mixture(take(TEACHER)) == [None, None, None]


def test_megatron_samples_nothing_without_an_engine() -> None:
    base = (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type gkd --model models/base --dataset rows.jsonl#1600 --micro_batch_size 2 "
        "--global_batch_size 16 --num_train_epochs 1 --use_vllm {}"
    )
    assert mixture(take(TEACHER, base.format("false --lmbda 1")))[0] == 0.0
    assert mixture(take(TEACHER, base.format("true --vllm_mode colocate")))[0] == 0.5


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        (
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
            "messages",
            {"messages": "messages", "response": "messages"},
        ),
        ('{"query": "q", "response": "a"}', "response", {"prompt": "query", "query": ""}),
        ('{"problem": "q", "solution": "a"}', "solution", {"prompt": "problem", "query": "", "response": "solution"}),
        ('{"instruction": "q", "input": "", "output": "a"}', "output", None),
        ('{"prompt": "q", "labels": "a"}', "labels", {"prompt": "prompt", "query": ""}),
    ],
)
def test_the_column_of_the_responses_is_the_one_of_the_first_row(
    tmp_path: Path, row: str, column: str, expected: dict[str, str] | None
) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    run = take(f"{TEACHER} --lmbda 0.5", folder=tmp_path)
    assert mixture(run)[1] == column and run.get("megatron_training.map_keys") == expected
    assert run.get("megatron_training.dataset_additional_keys") == [column]
    handler = "R1SharegptStyleInstructionHandler" if column == "messages" else None
    assert run.get("megatron_training.handler_name") == handler


def test_messages_that_end_with_a_question_have_no_response(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}], "solution": "a"}')
    with pytest.raises(ConfigError, match="--lmbda: not available here: rows without responses next to a value below 1"):
        take(f"{TEACHER} --lmbda 0.5", folder=tmp_path)
    assert take(TEACHER, folder=tmp_path).get("megatron_training.handler_name") is None


def test_rows_that_a_plug_in_makes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("from swift.dataset import register_dataset\nregister_dataset(...)\n")
    with pytest.raises(ConfigError, match=r"rows of rows.jsonl that its code makes \(register_dataset\).*--set dataset=FILE"):
        take(f"{TEACHER} --external_plugins plugin.py", folder=tmp_path)


SEVERAL = (
    '--teacher_model_server \'[{"url": "http://a:1", "tags": ["math", "logic"]}, '
    '{"url": "http://b:2/v1/", "tags": ["code"]}]\' --teacher_tag_key tag --temperature 1'
)


def test_several_servers_teach_the_rows_with_their_tags() -> None:
    run = take(f"{SEVERAL} --gkd_logits_topk 8")
    names = ("teacher_models", "teacher_keys", "teacher_key")
    urls = ["http://a:1/v1", "http://a:1/v1", "http://b:2/v1"]
    assert [keys(run)[name] for name in names] == [urls, ["math", "logic", "code"], "tag"]
    assert run.get("megatron_training.dataset_additional_keys") == ["tag"]
    grpo = take(f"{SEVERAL} --reward_funcs accuracy", GKD.replace("gkd", "grpo").replace("steps 2", "steps 8"))
    assert [keys(grpo)[name] for name in names] == [urls, ["math", "logic", "code"], "tag"]
    assert grpo.get("megatron_training.dataset_additional_keys") == ["labels", "tag"]


def test_the_options_of_gkd_change_nothing_in_grpo() -> None:
    command = GKD.replace("gkd", "grpo") + " --reward_funcs accuracy --sft_alpha 0.1"
    run = import_command(PROJECT, command, ImportSettings(rewards=REWARDS))
    assert run.without_effect["--lmbda"] == run.without_effect["--sft_alpha"] == "GKD reads it"


def test_the_built_in_scheduler_continues_wrong_responses() -> None:
    run = take(f"{TEACHER} --multi_turn_scheduler math_tip_trick --max_turns 2 --loss_scale last_round")
    assert run.get("rl_config.multi_turn_scheduler") == "mindspeed_rl.rollout.agents.swift_schedulers:MathTips"
    assert run.get("megatron_training.dataset_additional_keys") == ["labels"]
    assert "only the last trains" in fail(f"{TEACHER} --multi_turn_scheduler a:B --loss_scale last_round")

"""What a command of slime or MindSpeed-LLM leaves to Megatron's defaults, or says of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.rewards import REWARDS

SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --prompt-data d.jsonl --rm-type math "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rollout-num-gpus-per-engine 2 "
    "--num-rollout 10 "
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 "
LLM = (
    "torchrun --nproc_per_node 8 --nnodes 1 posttrain_gpt.py --stage sft --micro-batch-size 1 --global-batch-size 64 "
    "--seq-length 4096 --train-iters 200 --lr 1e-6 --bf16 --load ./ckpt --tokenizer-name-or-path ./m "
    "--calculate-per-token-loss " + NO_DROPOUT
)
EXPERTS = "--num-experts 64 --moe-ffn-hidden-size 1024 --moe-router-topk 4 --expert-model-parallel-size 2 --moe-grouped-gemm "


def take(project: str, command: str, *accepted: str) -> Import:
    return import_command(PROJECTS[project], command, ImportSettings(rewards=REWARDS, accepted=frozenset(accepted)))


def test_dropout_of_megatron_acts_in_the_updates_of_a_rollout() -> None:
    # Megatron's defaults are 0.1, and slime computes log-probs with model.eval() and updates with model.train()
    run = take("slime", SLIME + "--hf-checkpoint m")
    assert run.tree["megatron_training"]["attention_dropout"] == 0.1
    assert run.tree["rl_config"]["dropout_in_update"] is True
    assert "dropout_in_update" not in take("slime", SLIME + NO_DROPOUT + "--hf-checkpoint m").tree["rl_config"]


def test_experts_without_an_option_have_no_balancing_loss_of_config_json(tmp_path: Path) -> None:
    training = take("slime", SLIME + NO_DROPOUT + "--hf-checkpoint m").tree["megatron_training"]
    assert (training["moe_aux_loss_coeff"], training["moe_router_bias_update_rate"]) == (0.0, 0.0)
    # Megatron moves a bias that it has by 0.001
    biased = take("slime", SLIME + NO_DROPOUT + "--hf-checkpoint m --num-experts 8 --moe-router-enable-expert-bias")
    assert "moe_router_bias_update_rate" not in biased.tree["megatron_training"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    dense = take("slime", SLIME + NO_DROPOUT + f"--hf-checkpoint {tmp_path}").tree["megatron_training"]
    assert "moe_aux_loss_coeff" not in dense


def test_slime_generates_until_there_are_enough_groups() -> None:
    option = "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    rl = take("slime", SLIME + NO_DROPOUT + "--hf-checkpoint m " + option).tree["rl_config"]
    assert (rl["dynamic_sample"], rl["max_resample_times"]) == (True, 1_000_000)


def test_log_probs_of_the_engine_are_those_of_the_old_policy() -> None:
    run = take("slime", SLIME + NO_DROPOUT + "--hf-checkpoint m --use-rollout-logprobs")
    assert run.tree["rl_config"]["old_log_probs"] == "rollout"
    assert run.plans is not None and run.plans[0].old_policy == run.plans[1].old_policy == "rollout engine"


def test_slime_evaluates_with_the_sampling_of_the_rollout() -> None:
    command = SLIME + NO_DROPOUT + "--hf-checkpoint m --eval-prompt-data aime a.jsonl --eval-interval 5 "
    assert take("slime", command).tree["rl_config"]["eval_greedy"] is False
    assert take("slime", command + "--eval-temperature 0").tree["rl_config"]["eval_greedy"] is True
    other = take("slime", command + "--eval-top-p 0.7 --n-samples-per-eval-prompt 16")
    assert "'eval_top_p': 0.7" in str(other.tree)
    longer = take("slime", command + "--eval-max-response-len 9000")
    assert "9000: held-out prompts are sampled as in training, with " in longer.without_effect["--eval_max_response_len"]
    assert "'eval_n_samples': 16" in str(other.tree)


def test_a_dataset_without_split_holds_rows_back() -> None:
    # Megatron-LM: --split is 969, 30, 1 where only --data-path is given
    assert take("mindspeed-llm", LLM + "--data-path ./d").tree["megatron_training"]["split"] == "969,30,1"
    own = take("mindspeed-llm", LLM + "--data-path ./d --split 100,0,0").tree["megatron_training"]
    assert own["split"] == "100,0,0"


def test_positions_that_begin_anew_do_not_hide_other_samples() -> None:
    # decoder_packed_mtf_dataset.py resets positions inside `if reset_attention_mask`; attention crosses samples without it
    alone = take("mindspeed-llm", LLM + "--data-path ./d --pack --reset-position-ids")
    assert not {"reset_position_ids", "reset_attention_mask"} & alone.tree["megatron_training"].keys()
    assert "only with --reset-attention-mask" in alone.same["reset_position_ids"]
    both = take("mindspeed-llm", LLM + "--data-path ./d --pack --reset-position-ids --reset-attention-mask").tree
    assert both["megatron_training"]["reset_position_ids"] and both["megatron_training"]["reset_attention_mask"]
    neat = take("mindspeed-llm", LLM + "--data-path ./d --neat-pack").tree["megatron_training"]
    assert neat["pack"] is True and not {"neat_pack", "reset_attention_mask"} & neat.keys()
    neat = take("mindspeed-llm", LLM + "--data-path ./d --neat-pack --reset-attention-mask").tree["megatron_training"]
    assert neat["neat_pack"] and neat["reset_attention_mask"]
    pretrain = LLM.replace("posttrain_gpt.py --stage sft", "pretrain_gpt.py") + "--data-path ./d --reset-position-ids"
    training = take("mindspeed-llm", pretrain).tree["megatron_training"]
    assert training["reset_position_ids"] is True and "reset_attention_mask" not in training


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        (EXPERTS + "--fix-router", "routing", "evenly over the experts"),
        ("--reset-attention-mask --fix-sub-seq-length 2048", "sample_borders", "every 2048 tokens"),
        ("--rotary-percent 0.5 --use-glm-rope --post-norm", "layers", "post_norm true, rotary_percent 0.5, use_glm_rope true"),
        ("--mtp-num-layers 1", "prediction_states", "before the last norm"),
    ],
)
def test_what_a_run_has_otherwise_is_a_number_that_is_accepted_by_name(options: str, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} would be .*but is .*{text}.*--accept {name} takes the difference"):
        take("mindspeed-llm", LLM + "--data-path ./d " + options)
    run = take("mindspeed-llm", LLM + "--data-path ./d " + options, name)
    assert text in run.summarize()


@pytest.mark.parametrize(
    "options", ["--fix-router", "--fix-sub-seq-length 2048", "--rotary-percent 1.0", "--sliding-window None"]
)
def test_an_option_that_changes_nothing_needs_no_acceptance(options: str) -> None:
    take("mindspeed-llm", LLM + "--data-path ./d " + options)


def test_shared_experts_are_counted_by_their_width() -> None:
    training = take(
        "mindspeed-llm", LLM + "--data-path ./d " + EXPERTS + "--moe-shared-expert-intermediate-size 2048"
    ).tree["megatron_training"]
    assert training["n_shared_experts"] == 2
    with pytest.raises(ConfigError, match="width 1500, no multiple of the width of an expert .1024."):
        take("mindspeed-llm", LLM + "--data-path ./d " + EXPERTS + "--moe-shared-expert-intermediate-size 1500")


def test_a_router_over_all_experts_does_not_normalize_the_chosen_ones() -> None:
    softmax = "--moe-router-pre-softmax "
    keys = take("mindspeed-llm", LLM + "--data-path ./d " + EXPERTS + softmax).tree["megatron_training"]
    assert keys["norm_topk_prob"] is False
    keys = take("mindspeed-llm", LLM + "--data-path ./d " + EXPERTS + softmax + "--norm-topk-prob").tree["megatron_training"]
    assert keys["norm_topk_prob"] is True


def test_msrun_says_the_devices_and_the_framework_changes_no_number() -> None:
    command = LLM.replace("torchrun --nproc_per_node 8 --nnodes 1", "msrun --worker_num 16 --local_worker_num 8")
    run = take("mindspeed-llm", command + "--data-path ./d --ai-framework mindspore")
    assert run.tree["megatron_training"]["num_npus"] == 16
    assert "ai_framework" not in run.tree["megatron_training"]


def test_experts_with_adapters_do_without_the_overlap_that_has_none() -> None:
    options = EXPERTS + "--moe-alltoall-overlap-comm --lora-target-modules linear_qkv linear_fc1 "
    run = take("mindspeed-llm", LLM + "--data-path ./d " + options)
    assert "moe_alltoall_overlap_comm" not in run.tree["megatron_training"]
    assert "nothing in this run reads" in run.without_effect["moe_alltoall_overlap_comm"]


def test_slime_s_samples_of_held_out_prompts_are_those_of_its_evaluation() -> None:
    command = SLIME + NO_DROPOUT + "--hf-checkpoint m --eval-prompt-data aime a.jsonl --eval-interval 5 "
    several = take("slime", command + "--eval-temperature 0.6 --n-samples-per-eval-prompt 8 --eval-top-p 0.7")
    keys = {name: value for group in several.tree.values() if isinstance(group, dict) for name, value in group.items()}
    assert (keys["eval_n_samples"], keys["eval_temperature"], keys["eval_top_p"]) == (8, 0.6, 0.7)
    # greedy samples are all the same
    greedy = take("slime", command + "--eval-temperature 0 --n-samples-per-eval-prompt 8")
    assert greedy.tree["rl_config"]["eval_greedy"] is True and "eval_n_samples" not in str(greedy.tree)
    assert "all the same" in greedy.without_effect["--n_samples_per_eval_prompt"]


def test_adapters_of_latent_attention_are_those_that_it_has_here() -> None:
    latent = (
        "--multi-latent-attention --qk-pos-emb-head-dim 64 --qk-head-dim 128 --q-lora-rank 1536 --kv-lora-rank 512 "
        "--v-head-dim 128 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 "
    )
    command = LLM + latent + "--data-path ./d --lora-r 8 --lora-target-modules "
    with pytest.raises(ConfigError, match="adapter_form would be LoRA here, but is LoRA, also of linear_qkv"):
        take("mindspeed-llm", command + "linear_qkv linear_proj")
    plain = take("mindspeed-llm", command + "linear_proj")
    assert plain.get("megatron_training.lora_target_modules") == ["linear_proj"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("rlhf_gpt.py --config-name grpo_qwen25_7b_A3", "rlhf_gpt.py: it starts MindSpeed-RL by the name of a run file"),
        ("pretrain_mamba.py --num-layers 4", "pretrain_mamba.py: not available here: Mamba"),
    ],
)
def test_other_scripts_of_mindspeed_llm_are_refused_by_name(script: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        take("mindspeed-llm", f"torchrun --nproc_per_node 8 {script}")

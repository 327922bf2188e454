"""A published Qwen3.5, which has a tower and a prediction layer: the layer's drafts change no response to a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from scripts import load_script
from test_vision_run import GRPO, REWARD, command, metrics

_HIDDEN = 128
_KEYS = [
    *("actor_config.load=model", "actor_config.save=null", "actor_config.save_hf=false", "actor_config.bf16=true"),
    *("rl_config.verifier_function=[looks:starts_even]", "rl_config.log_probs_diff_limit=0.5"),
    *("generate_config.dtype=bfloat16", "+megatron_training.mtp_num_layers=1"),
    # of no effect: with drafts responses end in another order, and a trainer in bfloat16 rounds another order otherwise
    *("actor_config.lr=1e-12", "actor_config.min_lr=0"),
    *("megatron_training.train_iters=3", "rl_config.use_prefix_grouper=false"),
]
_DRAFTS = "+generate_config.speculative_config={method: mtp, num_speculative_tokens: 1}"


def save_model(example, folder: Path) -> None:
    """Writes a tiny model of this class with the example's tokenizer and processor; the prediction layer is new."""
    tokenizer = example.make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in example.SPECIAL]
    torch.manual_seed(7)
    config = transformers.Qwen3_5Config(
        text_config={
            **{"vocab_size": 128, "hidden_size": _HIDDEN, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.05},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
            **{"full_attention_interval": 2, "mtp_num_hidden_layers": 1, "tie_word_embeddings": True},
            **{"bos_token_id": None, "eos_token_id": ids[1], "pad_token_id": ids[0]},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
        },
        vision_config={
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": _HIDDEN},
            **{"patch_size": 14, "num_position_embeddings": 64, "initializer_range": 0.05},
        },
        **dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), ids[3:])),
        tie_word_embeddings=True,
    )
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    source = "model.language_model.layers.1."
    layer = {name.replace(source, "mtp.layers.0."): value.clone() for name, value in tensors.items() if source in name}
    layer |= {f"mtp.{name}.weight": torch.zeros(_HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    layer["mtp.fc.weight"] = 0.1 * torch.randn(_HIDDEN, 2 * _HIDDEN)
    save_file(tensors | layer, path, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    example.save_processor(folder)
    for name, changes in (
        ("preprocessor_config.json", {"processor_class": "Qwen3VLProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    example = load_script("examples/vision/make_task.py")
    example.NUM_SFT, example.NUM_TRAIN, example.NUM_HELD_OUT = 8, 32, 16
    example.main(folder)
    save_model(example, folder / "model")
    (folder / "looks.py").write_text(REWARD)
    return folder


def run(task: Path, name: str, *changes: str) -> tuple[list[dict], list[str]]:
    """Records of a run, and its responses."""
    command("train", *GRPO, *_KEYS, *changes, f"run_dir={name}", folder=task)
    lines = [json.loads(line) for line in (task / name / "completions.jsonl").read_text().splitlines()]
    return metrics(task / name), sorted(f"{line['iteration']} {line['prompt']} {line['response']}" for line in lines)


@pytest.mark.slow
def test_drafts_of_the_prediction_layer_change_no_response_to_a_picture(task: Path) -> None:
    plain, expected = run(task, "plain")
    drafted, responses = run(task, "drafted", _DRAFTS)
    assert responses == expected and len(responses) > 20
    assert max(record["rollout/draft_acceptance"] for record in drafted) > 0
    # the layer that trains is sent, and proven
    name = "rollout/proven_parameters"
    assert min(record[name] for record in drafted) > max(record[name] for record in plain)
    assert all(record["rollout/log_probs_diff_mean"] < 0.01 for record in (*plain, *drafted))


@pytest.mark.slow
def test_a_prediction_layer_drafts_where_the_tower_is_left_out(task: Path) -> None:
    rows = [{"instruction": f"Say {letter}.", "output": letter} for letter in "abcdefghijklmnopqrstuvwx"]
    (task / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task / "letters.py").write_text(
        "def starts_even(prompt, response, label, **columns):\n"
        "    return float(bool(response) and ord(response[0]) % 2 == 0)\n"
    )
    keys = ["megatron_training.data_path=text.jsonl", "megatron_training.image_folder=null"]
    keys += ["rl_config.verifier_function=[letters:starts_even]", "actor_config.language_model_only=true"]
    keys += ["actor_config.freeze_vit=true", "actor_config.freeze_aligner=true"]
    _, expected = run(task, "text", *keys)
    drafted, responses = run(task, "text_drafted", *keys, _DRAFTS)
    assert responses == expected and max(record["rollout/draft_acceptance"] for record in drafted) > 0

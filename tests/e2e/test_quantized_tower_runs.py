"""GRPO of a tiny Qwen3.5 as it is published, with its tower, from quantized engines."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tiny_vision
from scripts import load_script
from test_vision_run import GRPO, SERVERS, command, metrics

REWARD = '''
def even(prompt, response, label, **columns):
    """1 where the first character has an even code."""
    return float(bool(response) and ord(response[0]) % 2 == 0)
'''
HALF = ["actor_config.bf16=true", "generate_config.dtype=bfloat16", "rl_config.log_probs_diff_limit=auto"]
DROPPED = [f"actor_config.{key}=true" for key in ("language_model_only", "freeze_vit", "freeze_aligner")]
#: name -> model, rows, format, further keys, and the bound of the mean difference of log-probs
RUNS: dict[str, tuple[str, str, str, list[str], float]] = {
    "text": ("dense", "text", "int8", [], 0.08),
    "images": ("dense", "pictures", "int8", ["generate_config.update_weight_mode=delta"], 0.08),
    "replayed": ("experts", "pictures", "int8", ["rl_config.router_replay.mode=R3"], 0.08),
    "without tower": ("experts", "text", "w4a8", DROPPED, 0.5),
    "served": ("dense", "pictures", "mxfp8", SERVERS, 0.3),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of text and rows with pictures, and two tiny models."""
    folder, draw = tmp_path_factory.mktemp("quantized"), random.Random(3)
    example = load_script("examples/vision/make_task.py")
    for name in ("dense", "experts"):
        is_sparse = name == "experts"
        tiny_vision.save_hybrid_for_the_example(example, folder / name, experts=is_sparse, tied=not is_sparse)
    (folder / "evens.py").write_text(REWARD)
    rows: dict[str, list[dict[str, object]]] = {"text": [], "pictures": []}
    for index in range(32):
        (folder / f"{index}.png").write_bytes(example.draw_picture(draw)[0])
        rows["pictures"].append({"instruction": f"<image>{index}?", "images": [f"{index}.png"], "output": "a"})
        rows["text"].append({"instruction": f"{index}?", "output": "a"})
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("name", RUNS)
def test_a_published_qwen35_trains_on_what_its_quantized_engine_samples(name: str, task: Path) -> None:
    model, rows, quantization, more, bound = RUNS[name]
    place = name.replace(" ", "_")
    folder = "null" if rows == "text" else "."
    keys = [f"run_dir={place}", f"megatron_training.data_path={rows}.jsonl", f"megatron_training.image_folder={folder}"]
    keys += [f"actor_config.load={model}", f"megatron_training.tokenizer_name_or_path={model}", "actor_config.save=null"]
    keys += ["actor_config.save_hf=false", "rl_config.verifier_function=[evens:even]", *HALF]
    command("train", *GRPO, *keys, f"generate_config.quantization={quantization}", *more, folder=task)
    records = metrics(task / place)
    assert [record["rollout/weight_version"] for record in records] == [1, 2]
    assert all(0 < record["rollout/log_probs_diff_mean"] < bound for record in records)
    assert all(0 < record["actor/grad_norm"] < 100 and record["rollout/proven_parameters"] > 40 for record in records)
    # routers of both sides differ where bfloat16 and int8 round otherwise
    assert all(record.get("router/agreement", 1.0) > 0.95 for record in records)

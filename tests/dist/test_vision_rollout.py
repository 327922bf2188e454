"""Weights of models with a vision tower go to vLLM, are proven there, and images give the same log-probs on both sides."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from patience import patient
from ports import find_free_port
from scripts import load_script

HERE = Path(__file__).resolve().parent


def _save_qwen3(example: Any, folder: Path) -> None:
    """A tiny Qwen3-VL with the tokenizer and the processor of the example."""
    tokenizer = example.make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in example.SPECIAL]
    torch.manual_seed(7)
    config = transformers.Qwen3VLConfig(
        text_config={
            **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.05},
            **{"bos_token_id": None, "eos_token_id": ids[1], "pad_token_id": ids[0]},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0},
                **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
        },
        vision_config={
            **{"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128},
            **{"patch_size": 14, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "initializer_range": 0.05},
        },
        **dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), ids[3:])),
        tie_word_embeddings=True,
    )
    transformers.Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    example.save_processor(folder)
    for name, changes in (
        ("preprocessor_config.json", {"processor_class": "Qwen3VLProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_the_engine_computes_with_the_trainers_tower(name: str, tmp_path: Path) -> None:
    example = load_script("examples/vision/make_task.py")
    folder = tmp_path / "model"
    if name == "qwen3":
        _save_qwen3(example, folder)
    else:
        example.save_model(folder)
    (tmp_path / "picture.png").write_bytes(example.draw_picture(random.Random(3))[0])
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    done = subprocess.run(
        [sys.executable, str(HERE / "vision_rollout_program.py"), str(folder), str(tmp_path / "picture.png")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["proven"] > 40
    assert max(report["image"], report["text"]) < 1e-5, report

"""Settings of the preprocessing run, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast, get_args

from mindspeed_rl.data.templates import Thinking, choose_thinking

#: a number of processes that any machine can start; all of them are forked at once
_MAX_WORKERS = 64
#: whole numbers, at least 1 where they are set
_COUNTS = (
    "seq_length", "max_samples", "min_pixels", "max_pixels", "video_min_frames", "video_max_frames", "video_min_pixels",
    "video_max_pixels",
)  # fmt: skip


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of a run, under the names of the flags and of the YAML keys."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tokenizer_type": ("PretrainedFromHF", "HuggingFaceTokenizer"),
        "on_bad_row": ("error", "skip"),
        "enable_thinking": get_args(Thinking),
        "mix_strategy": ("concat", "interleave_under", "interleave_over"),
    }

    input: str
    output_prefix: str
    handler_name: str = "GeneralPretrainHandler"
    tokenizer_type: str = "PretrainedFromHF"
    tokenizer_name_or_path: str | None = None
    tokenizer_not_use_fast: bool = False
    trust_remote_code: bool = False
    json_keys: Sequence[str] = ("text",)
    map_keys: Mapping[str, object] | None = None
    dataset_additional_keys: Sequence[str] = ()
    prompt_type: str | None = None
    prompt_type_path: str | None = None
    enable_thinking: str = "none"
    chat_template_kwargs: Mapping[str, object] | None = None
    reasoning_effort: str | None = None
    drop_thinking: bool | None = None
    system_prompt: str | None = None
    append_eod: bool = False
    seq_length: int | None = None
    pad_to_multiple_of: int = 1
    pack: bool = False
    neat_pack: bool = False
    placeholder_token: str = "ки"
    reward_tokens: Sequence[str] = ()
    workers: int = 1
    n_subs: int = 1
    log_interval: int = 100
    on_bad_row: str = "error"
    cache_dir: str | None = None
    streaming: bool = False
    hf_datasets_params: Mapping[str, object] | None = None
    dataset_dir: str | None = None
    interleave_probs: Sequence[float] = ()
    mix_strategy: str = "concat"
    max_samples: int | None = None
    seed: int = 1234
    image_folder: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    video_min_frames: int | None = None
    video_max_frames: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    language_model_only: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer_type not in self.choices["tokenizer_type"]:
            raise ValueError(
                f"tokenizer_type={self.tokenizer_type!r} is not supported; use PretrainedFromHF with a tokenizer folder"
            )
        if not self.tokenizer_name_or_path:
            raise ValueError("tokenizer_name_or_path is missing; give the folder of the tokenizer")
        if self.neat_pack:
            object.__setattr__(self, "pack", True)
        if self.pack and self.seq_length is None:
            raise ValueError("pack needs seq_length, the length of a packed row")
        for name in ("on_bad_row", "enable_thinking", "mix_strategy"):
            if getattr(self, name) not in self.choices[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(self.choices[name])}")
        thinking = choose_thinking(cast("Thinking", self.enable_thinking), self.chat_template_kwargs)
        object.__setattr__(self, "enable_thinking", thinking)
        for name in ("workers", "n_subs", "log_interval", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.workers > (limit := max(_MAX_WORKERS, 2 * (os.cpu_count() or 1))):
            raise ValueError(f"workers={self.workers} must be at most {limit} on this machine")
        if self.video_fps is not None and not 0 < self.video_fps < math.inf:
            raise ValueError(f"video_fps={self.video_fps} must be above 0, in frames per second")
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

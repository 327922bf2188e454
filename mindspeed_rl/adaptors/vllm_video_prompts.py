"""Prompts with videos in releases of vLLM that write them otherwise than the models' processors (0.23, of vllm-ascend 0.23).

- Qwen3-VL and Qwen3.5 (Qwen3VLMultiModalProcessor.get_video_repl): the frames and their times took the place of the marks
  before and after a video, which transformers keeps, from 5.10 on, and the trainer too; so prompts had two tokens less;
- Qwen2.5-VL (Qwen2_5_VLProcessingInfo, Qwen2_5_VLMultiModalProcessor): what a request says about the rate of its frames was
  left out, and 24 frames per second took its place: other rotary positions;
- settings of one kind of media (InputProcessingContext.call_hf_processor): the processor takes them out of the request's own
  mapping, so that frames of the second video of a prompt were resized again, by the processor's limits.

Later releases (0.32) have all of it. It can go when vllm-ascend needs one of them; `tests/unit/adaptors` looks at these.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config.model_metadata import VISION_VARIABLE

_applied = False


def keep_marks(details: Any, start: int, end: int) -> None:
    """Put the marks of a video before and after the tokens that take its place."""
    details.full = [start, *details.full, end]


def split_metadata(data: Mapping[str, Any], make_metadata: Any) -> dict[str, Any]:
    """Return a processor's arguments with frames and what is known of them apart."""
    videos = data.get("videos")
    if not videos:
        return dict(data)
    known = [{name: value for name, value in metadata.items() if name != "do_sample_frames"} for _, metadata in videos]
    return {
        **data,
        "videos": [frames for frames, _ in videos],
        "video_metadata": [make_metadata(**fields) for fields in known],
    }


def apply() -> None:
    """Replace the prompts in processes of runs with images, where the release needs it; idempotent."""
    global _applied
    if _applied or os.environ.get(VISION_VARIABLE) != "1":
        return
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLProcessingInfo
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor

    # a release that writes videos elsewhere keeps its prompts with images
    if "get_data_parser" not in vars(Qwen2_5_VLProcessingInfo) and hasattr(Qwen3VLMultiModalProcessor, "get_video_repl"):
        _replace()
    _applied = True


def _replace() -> None:
    from transformers.video_utils import VideoMetadata
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLMultiModalProcessor, Qwen2_5_VLProcessingInfo
    from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalDataParser
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor
    from vllm.multimodal.processing.context import InputProcessingContext

    later: Any = Qwen3VLMultiModalProcessor
    write = later.get_video_repl

    def write_with_marks(**named: Any) -> Any:
        details = write(**named)
        keep_marks(details, named["vision_start_token_id"], named["vision_end_token_id"])
        return details

    later.get_video_repl = staticmethod(write_with_marks)

    info: Any = Qwen2_5_VLProcessingInfo

    def build_parser(self: Any) -> Any:
        return Qwen2VLMultiModalDataParser(
            self.get_hf_config().vision_config.spatial_merge_size,
            video_needs_metadata=True,
            expected_hidden_size=self._get_expected_hidden_size(),
        )

    info.get_data_parser = build_parser

    earlier: Any = Qwen2_5_VLMultiModalProcessor
    process = earlier._call_hf_processor

    def process_with_rates(self: Any, prompt: str, mm_data: Mapping[str, Any], *others: Any, **named: Any) -> Any:
        return process(self, prompt, split_metadata(mm_data, VideoMetadata), *others, **named)

    earlier._call_hf_processor = process_with_rates

    context: Any = InputProcessingContext
    call = context.call_hf_processor

    def call_with_copies(self: Any, hf_processor: Any, data: Any, kwargs: Mapping[str, Any] | None = None, **named: Any) -> Any:
        own = {name: dict(value) if isinstance(value, dict) else value for name, value in (kwargs or {}).items()}
        return call(self, hf_processor, data, own, **named)

    context.call_hf_processor = call_with_copies

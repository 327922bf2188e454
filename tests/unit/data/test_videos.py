"""Videos of rows: forms, sampled frames, tokens, times, errors, storage; compared with the processors of transformers."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from patience import patient
from PIL.PngImagePlugin import PngInfo
from video_files import END, FAMILIES, IMAGE, START, VIDEO, make_video_folder, write_video
from vision_folder import encode

from mindspeed_rl.data.datasets import InstructionDataset
from mindspeed_rl.data.images import (
    ImageReader,
    ImageRules,
    StoredVideo,
    VideoPart,
    collapse_image_tokens,
    open_frames,
    prepare_images,
    read_references,
    split_images,
)
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.data.videos import VideoError, read_clip

_PROGRAM = """
import json, sys
from mindspeed_rl.adaptors import torchvision_cpu
torchvision_cpu.apply()
from functools import partial
from pathlib import Path
from PIL import Image
import numpy as np, torch
from transformers import AutoVideoProcessor, AutoImageProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.video_utils import VideoMetadata, read_video_opencv
from mindspeed_rl.data.images import ImageRules, StoredVideo, prepare_images, read_references
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
folder, data, limits = sys.argv[1:]
limits = MediaLimits(**json.loads(limits))
rules = ImageRules.read(folder, limits)
kind = Qwen3VLProcessor if rules.video.has_timestamps else Qwen2_5_VLProcessor
own = json.loads((Path(folder) / "video_preprocessor_config.json").read_text())
# by the processor's names
given = {"fps": limits.video_fps, "min_frames": limits.video_min_frames, "max_frames": limits.video_max_frames}
given = {name: value for name, value in given.items() if value is not None}
sizes = dict(shortest_edge=limits.video_min_pixels, longest_edge=limits.video_max_pixels)
given["size"] = own["size"] | {name: value for name, value in sizes.items() if value is not None}
image_processor = AutoImageProcessor.from_pretrained(folder)
video_processor = AutoVideoProcessor.from_pretrained(folder, **given)
default_fps = limits.video_fps or 2.0
parts = image_processor, load_tokenizer(folder), video_processor
processor = kind(*parts)
settings = PromptSettings(image_rules=rules, prompt_type="hf")
prompts = open_prompts(data, load_tokenizer(folder), max_prompt_length=4096, settings=settings)
for item, line in zip(prompts, Path(data).read_text().splitlines(), strict=True):
    row = json.loads(line)
    text = row["prompt"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    text = text.replace("<video>", "<|vision_start|><|video_pad|><|vision_end|>")
    videos, metadata = [], []
    for video in row["videos"]:
        video = video if isinstance(video, dict) else {"video": video}
        if isinstance(video["video"], list):
            frames = np.stack([np.asarray(Image.open(path)) for path in video["video"]])
            indices = list(range(len(frames)))
            one = VideoMetadata(total_num_frames=len(frames), fps=video.get("fps", default_fps), frames_indices=indices)
        else:
            rate = {"num_frames": video["num_frames"]} if "num_frames" in video else {"fps": video.get("fps", default_fps)}
            frames, one = read_video_opencv(video["video"], partial(parts[2].sample_frames, **rate))
            one.frames_indices = [int(index) for index in one.frames_indices]
        videos.append(torch.from_numpy(frames.transpose(0, 3, 1, 2).copy()))
        metadata.append(one)
    images = [Image.open(path) for path in row.get("images", [])] or None
    expected = processor(
        text=[text], images=images, videos=videos, video_metadata=metadata, do_sample_frames=False, return_tensors="pt"
    )
    assert item["prompt_ids"] == expected["input_ids"][0].tolist(), (line, item["prompt_ids"], expected["input_ids"])
    media = prepare_images(rules, read_references(item["columns"]))
    clips = [one for one in media if isinstance(one, StoredVideo)]
    assert [list(one.grid) for one in clips] == expected["video_grid_thw"].tolist()
    patches = torch.cat([part.read() for one in clips for part in one.list_parts()])
    assert patches.equal(expected["pixel_values_videos"])
    if not rules.video.has_timestamps:
        steps = torch.tensor([part.time_step for one in clips for part in one.list_parts()])
        assert (2 * torch.as_tensor(expected["second_per_grid_ts"])).equal(steps)
print("equal", len(prompts))
"""


def run_program(program: str, *arguments: object, timeout: float = 300) -> list[str]:
    environment = {"MINDSPEED_RL_VISION": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patient(timeout), env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.split()


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["plain", "capped", "limits"])
def test_ids_patches_and_times_are_those_of_the_models_own_processor(family: str, kind: str, tmp_path: Path) -> None:
    limits = {"cap_pixels_per_frame": True, "max_video_tokens": 4} if kind == "capped" else {}
    keys: dict[str, object] = {}
    if kind == "limits":
        keys = {"video_fps": 3.0, "video_min_frames": 2, "video_max_frames": 10, "video_max_pixels": 56 * 56 * 4}
    folder = make_video_folder(tmp_path, family, min_frames=4, max_frames=16, **limits)
    paths = [
        write_video(tmp_path / f"{index}.{'avi' if index % 2 else 'mp4'}", *shape, fps=fps, seed=index)
        for index, (shape, fps) in enumerate(
            [((16, 96, 64), 8.0), ((5, 40, 120), 4.0), ((61, 64, 64), 29.97), ((200, 48, 32), 25.0), ((4, 320, 240), 1.0)]
        )
    ]
    videos = list(map(str, paths))
    (tmp_path / "image.png").write_bytes(encode(60, 84))
    frames = []
    for index in range(5):
        frames.append(str(tmp_path / f"frame{index}.png"))
        Path(frames[-1]).write_bytes(encode(70, 50, seed=index))
    image = str(tmp_path / "image.png")
    rows = [{"prompt": "what <video> is it?", "videos": [video]} for video in videos]
    rows += [
        {"prompt": "<video>a<image>b<video>c", "videos": videos[:2], "images": [image]},
        {"prompt": "<image><video>", "videos": videos[2:3], "images": [image]},
        {"prompt": "<video><video>", "videos": [{"video": videos[0], "fps": 1.3}, {"video": videos[3], "num_frames": 6}]},
        {"prompt": "<video>", "videos": [{"video": frames}]},
        {"prompt": "<video>", "videos": [{"video": frames[:4], "fps": 0.7}]},
    ]
    data = write(tmp_path / "rows.jsonl", [row | {"labels": "x"} for row in rows])
    assert run_program(_PROGRAM, folder, data, json.dumps(keys)) == ["equal", str(len(rows))]


# ---------------------------------------------------------------------- forms


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> ImageRules:
    rules = ImageRules.read(make_video_folder(tmp_path_factory.mktemp("model"), "qwen3_vl", max_frames=16))
    assert rules is not None
    return rules


def opened(path: Path, rules: ImageRules, **settings: object) -> PromptDataset:
    settings = {"image_rules": rules, "prompt_type": "hf", "image_folder": str(path.parent), **settings}
    return open_prompts(path, load_tokenizer(rules.folder), max_prompt_length=2048, settings=PromptSettings(**settings))


def test_all_forms_of_rows_give_the_same_prompt(rules: ImageRules, tmp_path: Path) -> None:
    path = write_video(tmp_path / "one.mp4", 17, fps=8.0)
    url = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
    question = {"type": "text", "text": "what?"}
    forms = [
        {"prompt": "<video>what?", "videos": ["one.mp4"]},  # ms-swift
        {"prompt": "what?", "videos": ["one.mp4"]},
        {"prompt": "<video>what?", "videos": "one.mp4"},
        {"prompt": "<video>what?", "video": path.as_uri()},
        {"prompt": "<video>what?", "videos": [{"path": "one.mp4", "bytes": None}]},
        {"prompt": "<video>what?", "videos": [{"video": "one.mp4", "fps": 2}]},
        {"prompt": "<video>what?", "videos": [{"video": "one.mp4", "num_frames": 4}]},
    ]
    parts = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "video": str(path)},
        {"type": "video", "video": "one.mp4", "fps": 2.0},
        {"type": "video", "video": "one.mp4", "nframes": 4},
    ]
    chats = [{"prompt": [{"role": "user", "content": [part, question]}]} for part in parts]
    chats.append({"prompt": [{"role": "user", "content": [{"type": "video"}, question]}], "videos": ["one.mp4"]})  # TRL
    expected = None
    for index, row in enumerate(forms + chats):
        answer = {"reward_model": {"ground_truth": "x"}} if row in chats else {"labels": "x"}
        (item,) = opened(write(tmp_path / f"{index}.jsonl", [row | answer]), rules)
        (reference,) = read_references(item["columns"])
        found = item["prompt_ids"], [np.asarray(frame).tobytes() for frame in open_frames(reference)]
        expected = expected or found
        assert found == expected, row
    # 17 frames at 8 per second, 2 per second, at least 4: the frames 0, 5, 11 and 16
    assert expected is not None
    text = load_tokenizer(rules.folder).decode(expected[0]).replace("<|video_pad|>", "")
    mark = "<|vision_start|><|vision_end|>"
    assert text == f"<|vision_start|><0.3 seconds>{mark}<1.7 seconds>{mark}<|vision_end|>what?"


def test_a_row_without_videos_keeps_the_tag_as_text(rules: ImageRules, tmp_path: Path) -> None:
    row = {"prompt": "an html <video>?", "labels": "x"}
    (item,) = opened(write(tmp_path / "rows.jsonl", [row]), rules)
    assert load_tokenizer(rules.folder).decode(item["prompt_ids"]) == "an html <video>?"


_FRAMES = [f"{index}.png" for index in range(20)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<video>", "videos": ["none.mp4"]}, "none.mp4 cannot be read: it does not exist"),
        ({"prompt": "<video>", "videos": ["cut.mp4"]}, "cut.mp4 is broken"),
        ({"prompt": "<video>", "videos": ["torn.avi"]}, "torn.avi is broken: [0-9]+ of its 30 frames can be decoded"),
        ({"prompt": "<video>", "videos": ["text.mp4"]}, "text.mp4 is broken, or of no format"),
        ({"prompt": "<video>", "videos": ["empty.mp4"]}, "empty.mp4 is broken, or of no format"),
        ({"prompt": "<video>", "videos": ["single.avi"]}, "has a video of 1 frames; the model reads 2 or more"),
        ({"prompt": "<video>", "videos": ["thin.avi"]}, "one side may be at most 200 times the other"),
        ({"prompt": "<video>", "videos": ["https://host/one.mp4"]}, "is on the network; download it"),
        ({"prompt": "<video><video>", "videos": ["one.mp4"]}, "has 1 videos, and 2 times <video> in its text"),
        ({"prompt": "<|video_pad|>"}, "has 0 images, and 0 image tokens in its text; 0 videos, and 1 of theirs"),
        ({"prompt": "<video>", "videos": [7]}, "has a video of type int"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "fps": -1}]}, "has a video with fps=-1; it is a number above 0"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "fps": "2"}]}, "fps='2'; it is a number"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "fps": 10**400}]}, "fps=10+; it is a number"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "fps": 2, "nframes": 4}]}, "give one of them"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "num_frames": 40}]}, "samples 40 frames .* give 2 to 16"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "num_frames": 1}]}, "samples 1 frames .* give 2 to 16"),
        ({"prompt": "<video>", "videos": [{"video": "one.mp4", "start": 3}]}, "a video with 'start', which is not read"),
        ({"prompt": "<video>", "videos": [["0.png"]]}, "has a video of 1 images; the model reads 2 to 16 frames"),
        ({"prompt": "<video>", "videos": [_FRAMES]}, "has a video of 20 images; the model reads 2 to 16 frames"),
        ({"prompt": "<video>", "videos": [["0.png", "wide.png"]]}, "image 1 has 50 x 40 pixels, the first one 40 x 40"),
        ({"prompt": "<video>", "videos": [["0.png", "none.png"]]}, "none.png cannot be read"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "has 1 video parts without a video"),
        ({"prompt": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "only text, images and videos are supported"),
    ],
)  # fmt: skip
def test_a_wrong_video_is_named_with_its_row_or_left_out(rules: ImageRules, tmp_path: Path, row: dict, message: str) -> None:
    data = write_video(tmp_path / "one.mp4", 20, 40, 40).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").write_bytes(b"")
    write_video(tmp_path / "single.avi", 1, 40, 40)
    write_video(tmp_path / "thin.avi", 4, 8, 2000)
    torn = write_video(tmp_path / "torn.avi", 30, 40, 40).read_bytes()
    (tmp_path / "torn.avi").write_bytes(torn[: len(torn) // 2])
    for name in _FRAMES:
        (tmp_path / name).write_bytes(encode(40, 40))
    (tmp_path / "wide.png").write_bytes(encode(40, 50))
    answer = {"labels": "x", "reward_model": {"ground_truth": "x"}}
    good = row | {"prompt": "what?" if isinstance(row["prompt"], str) else [{"role": "user", "content": "what?"}], "videos": []}
    path = write(tmp_path / "rows.jsonl", [good | answer, row | answer])
    with pytest.raises(ValueError, match=message) as error:
        opened(path, rules)
    assert f"{path}, row 2:" in str(error.value)
    prompts = opened(path, rules, on_bad_row="skip")
    assert len(prompts) == 1 and prompts.dropped == {"malformed": 1}


# ---------------------------------------------------------------------- stored data sets


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_preprocessed_row_has_the_media_of_its_raw_row_and_a_pack_those_of_its_samples(family: str, tmp_path: Path) -> None:
    folder = make_video_folder(tmp_path, family)
    rules = ImageRules.read(folder)
    assert rules is not None
    first, second = write_video(tmp_path / "one.mp4", 17), write_video(tmp_path / "two.avi", 24, 60, 60, seed=1)
    (tmp_path / "image.png").write_bytes(encode(56, 84))
    rows = []
    for content in ("v", "iw", "", "wiv"):
        sources = {"v": ("video", str(first)), "w": ("video", str(second)), "i": ("image", str(tmp_path / "image.png"))}
        parts = [{"type": sources[name][0], sources[name][0]: sources[name][1]} for name in content]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "a" * (1 + len(rows))}]}
        rows.append({"messages": [question, {"role": "assistant", "content": "b"}]})
    data = write(tmp_path / "rows.jsonl", rows)
    keys = {"input": str(data), "handler_name": "OpenAIInstructionHandler", "prompt_type": "hf"}
    keys["tokenizer_name_or_path"] = str(folder)
    run(PreprocessConfig(**keys, output_prefix=str(tmp_path / "set")))
    reader = ImageReader.build(rules, load_tokenizer(str(folder)))
    clips = {name: reader.read_video(str(path)) for name, path in (("v", first), ("w", second))}
    dataset = InstructionDataset(tmp_path / "set", image_rules=rules)
    for index, content in enumerate(("v", "iw", "", "wiv")):
        sample = dataset[index]
        parts = [one for one in sample["images"] if isinstance(one, VideoPart)]
        stored = list({one.video.key: one.video for one in parts}.values())
        names = [name for name in content if name != "i"]
        expected = [open_frames(clips[name]) for name in names]
        assert [[np.asarray(frame).tolist() for frame in open_frames(one.key)] for one in stored] == [
            [np.asarray(frame).tolist() for frame in frames] for frames in expected
        ]
        per_video = [1 if family == "qwen2_5_vl" else one.grid[0] for one in stored]
        assert len(parts) == sum(per_video) and len(sample["images"]) == len(parts) + content.count("i")
        is_media = np.isin(sample["input_ids"], [IMAGE, VIDEO])
        assert is_media.sum() == sum(np.prod(one.grid) // 4 for one in sample["images"])
        assert (sample["labels"][is_media] == -100).all()
    run(PreprocessConfig(**keys, output_prefix=str(tmp_path / "packs"), pack=True, neat_pack=True, seq_length=512))
    packs = InstructionDataset(tmp_path / "packs", image_rules=rules)
    seen = []
    for index in range(len(packs)):
        sample = packs[index]
        ends = np.cumsum(sample["sample_lengths"]).tolist()
        ids = [sample["input_ids"][start:end] for start, end in zip([0, *ends], ends)]
        seen += [len(media) for media in split_images(sample["images"], ids)]
    assert len(packs) < len(rows) and sorted(seen) == sorted(len(dataset[index]["images"]) for index in range(4))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_data_set_that_was_preprocessed_with_other_limits_is_refused(family: str, tmp_path: Path) -> None:
    folder, video = make_video_folder(tmp_path, family), str(write_video(tmp_path / "one.mp4", 40))
    rows = [{"instruction": "<video>a", "output": "b", "videos": [video]}]
    keys = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "hf", "tokenizer_name_or_path": str(folder)}
    run(PreprocessConfig(input=str(write(tmp_path / "rows.jsonl", rows)), output_prefix=str(tmp_path / "set"), **keys))
    rows[0]["videos"] = [{"video": video, "fps": 2.0}]  # the rate of the processor, but the row's own
    run(PreprocessConfig(input=str(write(tmp_path / "own.jsonl", rows)), output_prefix=str(tmp_path / "own"), **keys))

    def opened(name: str, **limits: float) -> object:
        return InstructionDataset(tmp_path / name, image_rules=ImageRules.read(folder, MediaLimits(**limits)))[0]

    assert opened("set", video_max_frames=10) and opened("own", video_fps=1.0)
    with pytest.raises(ValueError, match=r"row 0: a video was preprocessed to 10 frames of 40, by other limits than video_fps"):
        opened("set", video_fps=1.0)
    with pytest.raises(ValueError, match=r"video_max_frames=6 of this run"):
        opened("own", video_max_frames=6)
    with pytest.raises(ValueError, match=r"a video was preprocessed to \d+ x \d+ pixels, and is"):
        opened("set", video_max_pixels=28 * 28 * 2 * (1 if family == "qwen2_5_vl" else 10))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"video_min_frames": 20, "video_max_frames": 8}, r"video_min_frames=20, video_max_frames=8: frames .* not below"),
        ({"video_max_frames": 1}, r"video_min_frames=4 \(the processor's\), video_max_frames=1: .* come in steps of 2"),
        ({"video_max_pixels": 700}, r"video_min_pixels=\d+ \(the processor's\), video_max_pixels=700: a token"),
    ],
)
def test_limits_that_leave_nothing_are_refused(limits: dict[str, int], message: str, tmp_path: Path) -> None:
    folder = make_video_folder(tmp_path, "qwen3_vl")
    with pytest.raises(ValueError, match=message):
        ImageRules.read(folder, MediaLimits(**limits))


@pytest.mark.parametrize(
    "limits", [{"video_fps": 0.0}, {"video_fps": float("nan")}, {"video_max_frames": 0}, {"min_pixels": 0}]
)
def test_a_limit_that_is_no_such_number_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limits))}=.* must be"):
        PreprocessConfig(input="a", output_prefix="b", tokenizer_name_or_path="c", **limits)


def test_limits_of_videos_need_a_model_that_reads_some(tmp_path: Path) -> None:
    folder = make_video_folder(tmp_path, "qwen2_5_vl", video_processor_type="OtherVideoProcessor")
    with pytest.raises(ValueError, match=r"video_fps: the model in .* reads no videos; leave it out"):
        ImageRules.read(folder, MediaLimits(video_fps=1.0))


# ---------------------------------------------------------------------- engines


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_engines_get_one_token_a_video_and_sampled_tokens_stay(family: str, tmp_path: Path) -> None:
    rules = ImageRules.read(make_video_folder(tmp_path, family))
    assert rules is not None
    reader = ImageReader.build(rules, load_tokenizer(rules.folder))
    (tmp_path / "image.png").write_bytes(encode(56, 84))
    clip, image = reader.read_video(str(write_video(tmp_path / "one.mp4", 30))), str(tmp_path / "image.png")
    video, picture = [START, VIDEO, END], [START, IMAGE, END]
    short = [40, *video, 41, *picture, 42, *video, 43]
    (((ids, _),), stored) = reader.expand([(short, [])], [clip, image, clip])
    assert [type(one) for one in stored] == [StoredVideo, type(stored[1]), StoredVideo] and len(ids) > 45
    assert collapse_image_tokens(ids, stored) == short
    sampled = [START, VIDEO, END, VIDEO, VIDEO, IMAGE]
    assert collapse_image_tokens([*ids, *sampled], stored) == [*short, *sampled]
    with pytest.raises(ValueError, match="has sampled an image token"):
        collapse_image_tokens([40, VIDEO, *ids], stored)
    with pytest.raises(ValueError, match="lacks the tokens of 1 of its 4 images"):
        collapse_image_tokens(ids, (*stored, *prepare_images(rules, [image])))


@pytest.mark.parametrize(
    "header",
    [
        *("{", "[]", "[" * 100_000, '{"height": 1e999}'),
        '{"height": 4, "width": 4, "source_size": [4, 4], "indices": [0], "fps": 1, "num_frames": 1e999}',
    ],
)
def test_a_clip_with_a_broken_header_is_a_malformed_row(header: str) -> None:
    info, buffer = PngInfo(), io.BytesIO()
    info.add_text("mindspeed_rl.clip", header)
    PIL.Image.new("RGB", (4, 4)).save(buffer, "PNG", pnginfo=info)
    with pytest.raises(VideoError, match="has a clip with a broken header"):
        read_clip(PIL.Image.open(buffer))

"""Images of rows: forms, tokens, grids, errors, storage; compared with the processor of transformers."""

from __future__ import annotations

import base64
import io
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import patient
from PIL import Image
from vision_folder import encode, make_folder

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data import images as data_images
from mindspeed_rl.data.datasets import InstructionDataset, PreferenceDataset, UnpairedDataset
from mindspeed_rl.data.images import (
    ImageError,
    ImageRules,
    StoredImage,
    collapse_image_tokens,
    embed_image,
    open_image,
    read_references,
    split_images,
)
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.workers.stages.preference import DirectPreference

START, END, PAD = 3, 4, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("vision_model"))


@pytest.fixture(scope="module")
def rules(folder: Path) -> ImageRules:
    rules = ImageRules.read(folder)
    assert rules is not None
    return rules


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, rules: ImageRules, **settings: object) -> PromptDataset:
    settings = {"image_rules": rules, "prompt_type": "hf", **settings}
    return open_prompts(path, load_tokenizer(rules.folder), max_prompt_length=512, settings=PromptSettings(**settings))


def text_ids(folder: str, text: str) -> list[int]:
    return load_tokenizer(folder).encode(text, add_special_tokens=False)


def image_ids(rules: ImageRules, height: int, width: int) -> list[int]:
    _, rows, columns = rules.grid(height, width)
    return [START, *[PAD] * (rows * columns // 4), END]


# ---------------------------------------------------------------------- against transformers


def test_ids_and_patches_are_those_of_the_models_own_processor(folder: Path, tmp_path: Path) -> None:
    sizes = [(84, 84), (28, 28), (40, 97), (300, 200), (9, 31), (500, 20)]
    paths = []
    for index, (height, width) in enumerate(sizes):
        paths.append(tmp_path / f"{index}.{'jpg' if index % 2 else 'png'}")
        paths[-1].write_bytes(encode(height, width, "JPEG" if index % 2 else "PNG", index))
    rows = [
        {"prompt": f"one <image> and {'<image>' * (count - 1)} end", "labels": "x", "images": list(map(str, paths[:count]))}
        for count in (1, 3, 6)
    ]
    program = """
import json, sys
from mindspeed_rl.adaptors import torchvision_cpu
torchvision_cpu.apply()
from pathlib import Path
from typing import Any
from PIL import Image
from transformers import AutoProcessor
from mindspeed_rl.data.images import ImageRules, prepare_images, read_references
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.workers.stages.preference import DirectPreference
folder, data = sys.argv[1:]
rules, processor = ImageRules.read(folder), AutoProcessor.from_pretrained(folder)
settings = PromptSettings(image_rules=rules, prompt_type="hf")
prompts = open_prompts(data, load_tokenizer(folder), max_prompt_length=512, settings=settings)
for item, line in zip(prompts, Path(data).read_text().splitlines()):
    row = json.loads(line)
    text = row["prompt"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    expected = processor(text=[text], images=[Image.open(path) for path in row["images"]], return_tensors="pt")
    assert item["prompt_ids"] == expected["input_ids"][0].tolist()
    images = prepare_images(rules, read_references(item["columns"]))
    assert [list(image.grid) for image in images] == expected["image_grid_thw"].tolist()
    for image, patches in zip(images, expected["pixel_values"].split([image.num_tokens * 4 for image in images])):
        assert image.read().equal(patches)
print("equal", type(processor.image_processor).__module__)
"""
    data = write(tmp_path / "rows.jsonl", rows)
    environment = {"MINDSPEED_RL_VISION": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(folder), str(data)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patient(300), env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    # the backend that vLLM takes, not the one of pillow
    assert result.stdout.split() == ["equal", "transformers.models.qwen2_vl.image_processing_qwen2_vl"]


def test_grids_are_those_of_transformers(rules: ImageRules) -> None:
    resize = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    draw = np.random.RandomState(3)
    for height, width in draw.randint(8, 3000, (500, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            expected = resize(height, width, 28, rules.min_pixels, rules.max_pixels)
            assert rules.grid(height, width) == (1, expected[0] // 14, expected[1] // 14)


# ---------------------------------------------------------------------- forms


def test_all_forms_of_rows_give_the_same_prompt(rules: ImageRules, tmp_path: Path) -> None:
    data = encode(84, 60)
    (tmp_path / "one.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    question = {"type": "text", "text": "what?"}
    forms = [
        {"prompt": "<image>what?", "images": ["one.png"]},  # ms-swift
        {"prompt": "what?", "images": ["one.png"]},
        {"prompt": "<image>what?", "images": "one.png"},
        {"prompt": "<image>what?", "images": [{"path": "one.png", "bytes": None}]},
        {"prompt": "<image>what?", "images": [text]},
        {"prompt": "<image>what?", "image": (tmp_path / "one.png").as_uri()},  # LLaVA's name of the column
    ]
    parts = [
        {"type": "image_url", "image_url": {"url": url}},  # OpenAI
        {"type": "image", "image": str(tmp_path / "one.png")},
        {"type": "image", "url": (tmp_path / "one.png").as_uri()},
    ]
    chats = [{"prompt": [{"role": "user", "content": [part, question]}]} for part in parts]
    chats.append({"prompt": [{"role": "user", "content": [{"type": "image"}, question]}], "images": ["one.png"]})  # TRL
    verl = {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [{"bytes": None, "path": "one.png"}]}
    chats.append(verl)
    expected = image_ids(rules, 84, 60) + text_ids(rules.folder, "what?")
    for index, row in enumerate(forms + chats):
        answer = {"reward_model": {"ground_truth": "x"}} if row in chats else {"labels": "x"}
        prompts = opened(write(tmp_path / f"{index}.jsonl", [row | answer]), rules, image_folder=str(tmp_path))
        item = prompts[0]
        assert item["prompt_ids"] == expected, row
        (reference,) = read_references(item["columns"])
        assert np.array_equal(np.asarray(open_image(reference)), np.asarray(open_image(str(tmp_path / "one.png")))), row


def test_a_row_of_text_is_as_it_was(rules: ImageRules, tmp_path: Path) -> None:
    prompts = opened(write(tmp_path / "text.jsonl", [{"prompt": "a < b", "labels": "x"}]), rules)
    assert prompts[0]["prompt_ids"] == text_ids(rules.folder, "a < b") and read_references(prompts[0]["columns"]) == ()


def test_bytes_of_rows_become_references_into_one_file_with_each_image_once(rules: ImageRules, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures = [encode(40, 40, seed=seed) for seed in (0, 1, 0)]
    table = {"prompt": ["what?"] * 3, "labels": ["x"] * 3, "images": [[{"bytes": data, "path": None}] for data in pictures]}
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    prompts = opened(tmp_path / "rows.parquet", rules)
    prompts.store_images(tmp_path / "run" / "images.bin")
    references = [read_references(prompts[index]["columns"])[0] for index in range(3)]
    assert references[0] == references[2] != references[1] and all(len(one) < 200 for one in references)
    assert (tmp_path / "run" / "images.bin").read_bytes() == pictures[0] + pictures[1]
    for reference, data in zip(references, pictures):
        (tmp_path / "single.png").write_bytes(data)
        assert np.array_equal(np.asarray(open_image(reference)), np.asarray(open_image(str(tmp_path / "single.png"))))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "images": ["missing.png"]}, "missing.png cannot be read"),
        ({"prompt": "<image>", "images": ["cut.png"]}, "cut.png is broken"),
        ({"prompt": "<image>", "images": ["cut.jpg"]}, "cut.jpg is broken"),
        ({"prompt": "<image>", "images": ["text.png"]}, "text.png is broken"),
        ({"prompt": "<image>", "images": ["https://host/one.png"]}, "is on the network; download it"),
        ({"prompt": "<image><image>", "images": ["one.png"]}, "has 1 images, and 2 times <image> in its text"),
        ({"prompt": "<image>"}, "has 0 images, and 1 times <image> in its text"),
        ({"prompt": "<|image_pad|>"}, "has 0 images, and 1 image tokens in its text"),
        ({"prompt": "<image>", "images": [7]}, "has an image of type int"),
        ({"prompt": "<image>", "images": ["thin.png"]}, "one side may be at most 200 times the other"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "only images are supported"),
    ],
)  # fmt: skip
def test_a_wrong_image_is_named_with_its_row_or_left_out(rules: ImageRules, tmp_path: Path, row: dict, message: str) -> None:
    (tmp_path / "one.png").write_bytes(encode(40, 40))
    (tmp_path / "cut.png").write_bytes(encode(40, 40)[:-900])
    (tmp_path / "cut.jpg").write_bytes(encode(400, 400, "JPEG")[:9000])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "thin.png").write_bytes(encode(1, 300))
    answer = {"labels": "x", "reward_model": {"ground_truth": "x"}}
    good = row | {"prompt": "what?" if isinstance(row["prompt"], str) else [{"role": "user", "content": "what?"}], "images": []}
    data = write(tmp_path / "rows.jsonl", [good | answer, row | answer])
    with pytest.raises(ValueError, match=message) as error:
        opened(data, rules, image_folder=str(tmp_path))
    assert f"{data}, row 2:" in str(error.value)
    prompts = opened(data, rules, image_folder=str(tmp_path), on_bad_row="skip")
    assert len(prompts) == 1 and prompts.dropped == {"malformed": 1}


def test_limits_without_a_size_and_a_model_of_text_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_pixels=784, max_pixels=700"):
        ImageRules.read(folder, MediaLimits(max_pixels=700))
    (tmp_path / "config.json").write_text("{}")
    assert ImageRules.read(tmp_path) is None
    with pytest.raises(ValueError, match="max_pixels: the model .* reads no images"):
        ImageRules.read(tmp_path, MediaLimits(max_pixels=700))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="no preprocessor_config.json"):
        ImageRules.read(tmp_path)


# ---------------------------------------------------------------------- stored datasets


def preprocess(folder: Path, data: Path, prefix: Path, **settings: object) -> None:
    run(
        PreprocessConfig(
            input=str(data), output_prefix=str(prefix), handler_name="OpenAIInstructionHandler", prompt_type="hf",
            tokenizer_name_or_path=str(folder), **settings,
        )
    )  # fmt: skip


def conversations(tmp_path: Path) -> list[dict]:
    """Rows with 0 to 3 images each, in one or two questions."""
    rows = []
    for index, count in enumerate([1, 0, 3, 2, 1, 1]):
        parts: list[dict] = []
        for number in range(count):
            path = tmp_path / f"{index}_{number}.png"
            path.write_bytes(encode(28 * (1 + number % 2), 56, seed=10 * index + number))
            parts.append({"type": "image", "image": str(path)})
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "a" * (index + 1)}]}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": "b"}]})
    return rows


@pytest.mark.parametrize("settings", [{}, {"n_subs": 3}, {"workers": 2}], ids=["one", "parts", "workers"])
def test_a_preprocessed_row_has_the_images_of_its_raw_row(
    folder: Path, rules: ImageRules, tmp_path: Path, settings: dict
) -> None:
    rows = conversations(tmp_path)
    preprocess(folder, write(tmp_path / "rows.jsonl", rows), tmp_path / "set", **settings)
    dataset = InstructionDataset(tmp_path / "set", image_rules=rules)
    for index, row in enumerate(rows):
        sample = dataset[index]
        parts = [part["image"] for part in row["messages"][0]["content"] if part["type"] == "image"]
        assert len(sample["images"]) == len(parts)
        for image, path in zip(sample["images"], parts):
            assert np.array_equal(np.asarray(open_image(image.key)), np.asarray(open_image(path)))
            assert image.num_tokens == rules.count_tokens(rules.grid(*np.asarray(open_image(path)).shape[:2]))
        # image tokens are read, and never learnt
        assert (sample["labels"][sample["input_ids"] == PAD] == -100).all()


@pytest.mark.parametrize("neat", [False, True])
def test_the_samples_of_a_pack_have_their_own_images(folder: Path, rules: ImageRules, tmp_path: Path, neat: bool) -> None:
    rows = conversations(tmp_path)
    preprocess(folder, write(tmp_path / "rows.jsonl", rows), tmp_path / "set", pack=True, neat_pack=neat, seq_length=64)
    dataset = InstructionDataset(tmp_path / "set", image_rules=rules, splits_packs=not neat, pad_id=0)
    seen = []
    for index in range(len(dataset)):
        sample = dataset[index]
        ends = np.cumsum(sample["sample_lengths"]).tolist()
        ids = [sample["input_ids"][start:end] for start, end in zip([0, *ends], ends)]
        for own, images in zip(ids, split_images(sample["images"], ids)):
            question = load_tokenizer(folder).decode(own[own > 6].tolist())
            seen.append((len(question) - 1, [np.asarray(open_image(image.key)) for image in images]))
    assert len(dataset) < len(rows) and sorted(count for count, _ in seen) == [1, 2, 3, 4, 5, 6]
    for length, pictures in seen:
        parts = [part["image"] for part in rows[length - 1]["messages"][0]["content"] if part["type"] == "image"]
        assert len(pictures) == len(parts)
        assert all(np.array_equal(found, np.asarray(open_image(path))) for found, path in zip(pictures, parts))


def preprocess_answers(folder: Path, rows: list[dict], prefix: Path, handler: str, **settings: object) -> None:
    data = write(prefix.with_suffix(".jsonl"), rows)
    keys = {"handler_name": handler, "prompt_type": "hf", "tokenizer_name_or_path": str(folder), **settings}
    run(PreprocessConfig(input=str(data), output_prefix=str(prefix), **keys))


def test_both_sides_of_a_pair_have_the_images_of_its_prompt(folder: Path, rules: ImageRules, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encode(56, 56))
    (tmp_path / "two.png").write_bytes(encode(56, 112))
    pair = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    rows = [
        {"conversations": [{"from": "human", "value": "what?"}], **pair},
        {"conversations": [{"from": "human", "value": "what?"}], "images": ["one.png"], **pair},
        {"conversations": [{"from": "human", "value": "a<image>b<image>"}], "images": ["one.png", "two.png"], **pair},
    ]
    settings = {"image_folder": str(tmp_path)}
    preprocess_answers(folder, rows, tmp_path / "pairs", "SharegptStylePairwiseHandler", **settings)
    # the prompt of a pair equals the same rows' as instruction data
    answers = [
        {"conversations": [*row["conversations"], {"from": "gpt", "value": "chosen"}], "images": row.get("images", [])}
        for row in rows
    ]
    preprocess_answers(folder, answers, tmp_path / "set", "SharegptStyleInstructionHandler", **settings)
    pairs = PreferenceDataset(tmp_path / "pairs", image_rules=rules)
    samples = InstructionDataset(tmp_path / "set", image_rules=rules)
    for index, names in enumerate(([], ["one.png"], ["one.png", "two.png"])):
        read = [np.asarray(open_image(image.key)) for image in pairs[index]["images"]]
        expected = [np.asarray(open_image(str(tmp_path / name))) for name in names]
        assert len(read) == len(expected)
        assert all(map(np.array_equal, read, expected))
        assert np.array_equal(pairs[index]["chosen_input_ids"], samples[index]["input_ids"])
        assert np.array_equal(pairs[index]["chosen_labels"], samples[index]["labels"])
        counts = [(pairs[index][f"{side}_input_ids"] == rules.token_id).sum() for side in ("chosen", "rejected")]
        assert counts == [sum(image.num_tokens for image in pairs[index]["images"])] * 2
        assert not (pairs[index]["rejected_labels"] == rules.token_id).any()
    rows = DirectPreference(MegatronConfig(), load_tokenizer(folder))
    rows.image_rules = rules
    engine_rows = rows.rows([pairs[2], pairs[0]])
    assert engine_rows.images == [pairs[2]["images"]] * 2 + [()] * 2


def test_pairs_in_trl_s_form_have_images_in_parts_of_the_prompt(folder: Path, rules: ImageRules, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encode(56, 56))
    url = "data:image/png;base64," + base64.b64encode(encode(56, 56)).decode()
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    question = {"type": "text", "text": "what?"}
    forms = [
        {"prompt": [{"role": "user", "content": [{"type": "image"}, question]}], "images": ["one.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, question]}]},
        {"instruction": "<image>what?", "images": ["one.png"]},
    ]
    rows = [form | answers for form in forms]
    preprocess_answers(folder, rows, tmp_path / "pairs", "AlpacaStylePairwiseHandler", image_folder=str(tmp_path))
    pairs = PreferenceDataset(tmp_path / "pairs", image_rules=rules)
    assert len(pairs) == 3
    for index in range(3):
        assert np.array_equal(pairs[index]["chosen_input_ids"], pairs[0]["chosen_input_ids"])
        pictures = [np.asarray(open_image(pairs[number]["images"][0].key)) for number in (0, index)]
        assert np.array_equal(*pictures)


def test_judged_answers_have_images_and_lend_answers_to_other_prompts(folder: Path, rules: ImageRules, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(encode(56, 56, seed=number))
    # two prompts of the same text with an image of one size; each has two answers
    rows = [
        {"instruction": "<image>what?", "input": "", "output": text, "label": True, "images": [f"{number}.png"]}
        for number, text in ((1, "a"), (1, "bb"), (2, "ccc"), (2, "dddd"))
    ]
    preprocess_answers(folder, rows, tmp_path / "answers", "AlpacaStyleUnpairedHandler", image_folder=str(tmp_path))
    dataset = UnpairedDataset(tmp_path / "answers", image_rules=rules)
    for index in range(4):
        sample = dataset[index]
        assert np.array_equal(
            np.asarray(open_image(sample["images"][0].key)), open_image(str(tmp_path / f"{index // 2 + 1}.png"))
        )
        lent = len(sample["mismatched_input_ids"]) - len(sample["input_ids"]) + index + 1
        assert (lent > 2) == (index < 2), "the answer is to the prompt with the other image"


def test_images_in_answers_and_in_other_data_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encode(56, 56))
    row = {"conversations": [{"from": "human", "value": "what?"}], "images": [str(tmp_path / "one.png")]}
    row |= {name: {"from": "gpt", "value": f"{name}<image>"} for name in ("chosen", "rejected")}
    with pytest.raises(ValueError, match="row 1: has an image in an answer"):
        preprocess_answers(folder, [row], tmp_path / "pairs", "SharegptStylePairwiseHandler")
    row = {"input": "ax", "value": ["+"], "images": [str(tmp_path / "one.png")]}
    with pytest.raises(ValueError, match="row 1: has images, which AlpacaStyleProcessRewardHandler does not read"):
        settings = {"placeholder_token": "x", "reward_tokens": ["+", "-"], "prompt_type": None}
        preprocess_answers(folder, [row], tmp_path / "steps", "AlpacaStyleProcessRewardHandler", **settings)


def test_a_dataset_of_other_limits_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(encode(200, 200))
    row = {"messages": [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]}
    data = write(tmp_path / "rows.jsonl", [row | {"images": [str(tmp_path / "one.png")]}])
    preprocess(folder, data, tmp_path / "set", max_pixels=28 * 28 * 4)
    InstructionDataset(tmp_path / "set", image_rules=ImageRules.read(folder, MediaLimits(max_pixels=28 * 28 * 4)))
    with pytest.raises(ValueError, match="preprocessed to 4 x 4 patches, and is 6 x 6"):
        InstructionDataset(tmp_path / "set", image_rules=ImageRules.read(folder))


# ---------------------------------------------------------------------- tokens for engines


def test_engines_get_one_token_an_image_and_sampled_image_tokens_stay(rules: ImageRules) -> None:
    images = [StoredImage(rules, "a", (1, 4, 4)), StoredImage(rules, "b", (1, 2, 4))]
    ids = [9, START, PAD, PAD, PAD, PAD, END, 8, START, PAD, PAD, END, 7, PAD, PAD, PAD]
    assert collapse_image_tokens(ids, images) == [9, START, PAD, END, 8, START, PAD, END, 7, PAD, PAD, PAD]
    with pytest.raises(ValueError, match="lacks the tokens of 1 of its 2 images"):
        collapse_image_tokens(ids[:8], images)
    with pytest.raises(ValueError, match="has sampled an image token"):
        collapse_image_tokens([9, PAD, *ids], images)
    with pytest.raises(ValueError, match="has sampled an image token"):  # as many as the image has, but not in its frame
        collapse_image_tokens([9, PAD, PAD, PAD, PAD, *ids], images)


def test_a_cut_image_is_an_error(rules: ImageRules) -> None:
    image = StoredImage(rules, "a", (1, 4, 4))
    with pytest.raises(ValueError, match="has a part of an image"):
        split_images([image], [np.array([START, PAD, PAD])])


def test_runs_of_text_import_no_library_of_images() -> None:
    program = (
        "import sys, mindspeed_rl.data.preprocess, mindspeed_rl.data.prompts, mindspeed_rl.data.datasets\n"
        "print([name for name in ('PIL', 'torchvision', 'torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(120))
    assert result.stdout.strip() == "[]", result.stdout + result.stderr[-500:]


def test_transparent_turned_and_grey_pictures_are_read_as_they_look(tmp_path: Path) -> None:
    from PIL import Image

    turned = Image.new("RGB", (4, 2), "red")
    exif = turned.getexif()
    exif[274] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(str(tmp_path / "turned.jpg")).size == (2, 4)
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    Image.new("L", (2, 2), 7).save(tmp_path / "grey.png")
    assert open_image(str(tmp_path / "grey.png")).getpixel((0, 0)) == (7, 7, 7)
    with pytest.raises(ImageError, match="is not base64"):
        open_image("data:image/png;base64,!")


def write_image(image: Image.Image, kind: str, **options: Any) -> str:
    """The reference of an image in a format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return embed_image(buffer.getvalue())


RAMP = np.tile(np.arange(256), (8, 1))
GREY = RAMP.astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_a_grey_image_of_16_bits_is_the_same_in_8(kind: str) -> None:
    found = np.asarray(open_image(write_image(Image.fromarray((RAMP * 257).astype(np.uint16)), kind)))
    assert np.array_equal(found, np.dstack([GREY] * 3))


def test_the_range_and_the_white_of_a_tiff_are_those_of_its_tags() -> None:
    # 12 bits, two values in three bytes: black, white
    strip = bytes([0x00, 0x0F, 0xFF])
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = struct.pack("<2sHI", b"II", 42, 12) + strip + b"\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert np.asarray(open_image(embed_image(data)))[0, :, 0].tolist() == [0, 255]
    inverted = write_image(Image.fromarray((RAMP * 257).astype(np.uint16)), "TIFF", tiffinfo={262: 0})
    assert np.array_equal(np.asarray(open_image(inverted))[..., 0], 255 - GREY)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_range_are_refused_before_a_run(dtype: type, tmp_path: Path) -> None:
    image = Image.fromarray((RAMP / 255).astype(dtype))
    image.save(path := tmp_path / "a.tif")
    for read, value in ((open_image, str(path)), (data_images.check_images, [str(path)]), (data_images.make_reference, image)):
        with pytest.raises(ImageError, match="as pixels, whose black and white are not defined; save it with 8 or 16 bits"):
            read(value)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_image_of_several_frames_is_refused(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 90, 200)]
    with pytest.raises(ImageError, match="has several frames or pages, of which a model would see the first"):
        open_image(write_image(frames[0], kind, save_all=True, append_images=frames[1:]))
    still = write_image(frames[2], kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert open_image(still).getpixel((0, 0)) == (200, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LA", "RGBA", "I;16"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_every_mode_is_turned_and_its_header_tells_the_size(mode: str, kind: str, orientation: int) -> None:
    if kind == "PNG" and mode in ("CMYK", "YCbCr") or kind == "TIFF" and mode == "YCbCr" and orientation != 1:
        pytest.skip("the format has no such images")
    source = Image.fromarray(GREY if mode != "1" else np.where(GREY > 99, 255, 0).astype(np.uint8))
    coloured = source if mode == "P" else source.convert("RGB")
    image = Image.fromarray((RAMP * 257).astype(np.uint16)) if mode == "I;16" else coloured.convert(mode)
    exif = Image.Exif()
    exif[274] = orientation
    reference = write_image(image, kind, exif=exif)
    # numpy's turns are to the left
    expected = np.rot90(np.asarray(source.convert("L")), {1: 0, 3: 2, 6: 3, 8: 1}[orientation]).astype(int)
    found = np.asarray(open_image(reference)).astype(int)
    assert found.shape[:2] == expected.shape == data_images._read_size(reference)
    assert np.abs(found - expected[..., None]).max() <= 1


@pytest.mark.parametrize("mode", ["CMYK", "HSV", "YCbCr", "RGBa", "I;16", "I;16B", "LA", "P"])
def test_an_image_of_pillow_in_a_row_keeps_its_pixels(mode: str) -> None:
    image = Image.fromarray(GREY)
    through = {"RGBa": ("RGBA", "RGBa"), "P": ("P",), "I;16": (), "I;16B": ()}.get(mode, ("RGB", mode))
    image = Image.fromarray((RAMP * 257).astype(">u2" if mode == "I;16B" else "<u2")) if "16" in mode else image
    for form in through:
        image = image.convert(form)
    assert image.mode == mode
    found = np.asarray(open_image(data_images.make_reference(image))).astype(int)
    assert np.abs(found - RAMP[..., None]).max() <= 1


def test_an_image_of_pillow_in_a_row_keeps_its_orientation() -> None:
    exif = Image.Exif()
    exif[274] = 6
    with Image.open(io.BytesIO(data_images.read_image(write_image(Image.fromarray(GREY), "PNG", exif=exif)))) as image:
        assert open_image(data_images.make_reference(image)).size == (8, 256)


def test_data_sets_of_llama_factory_have_images_and_rows_of_text(folder: Path, rules: ImageRules, tmp_path: Path) -> None:
    Image.new("RGB", (56, 84), "red").save(tmp_path / "red.png")
    chat = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "red"}]
    write(tmp_path / "seen.jsonl", [{"messages": chat, "images": ["red.png"]}])
    write(tmp_path / "text.jsonl", [{"instruction": "Hi", "output": "Ho"}])
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    info = {
        "seen": {"file_name": "seen.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags},
        "text": {"file_name": "text.jsonl"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    mixture = PreprocessConfig(
        input="seen,text", output_prefix=str(tmp_path / "mixed"), handler_name="LlamaFactoryInstructionHandler",
        prompt_type="hf", tokenizer_name_or_path=str(folder), dataset_dir=str(tmp_path), image_folder=str(tmp_path),
    )  # fmt: skip
    run(mixture)
    preprocess(folder, tmp_path / "seen.jsonl", tmp_path / "alone", image_folder=str(tmp_path))
    mixed, alone = (InstructionDataset(tmp_path / name, image_rules=rules) for name in ("mixed", "alone"))
    assert [len(mixed[index]["images"]) for index in range(2)] == [1, 0]
    for column in ("input_ids", "labels"):
        assert np.array_equal(mixed[0][column], alone[0][column])

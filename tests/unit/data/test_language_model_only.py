"""Data of a model that is used without its tower: rows of text as they are, and no row with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vision_folder import encode, make_folder

from mindspeed_rl.cli.main import main
from mindspeed_rl.config import MegatronConfig, load_run_config
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.trainers.supervised_data import list_data_checks

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TEXT = {"instruction": "ab", "output": "c"}
IMAGE = {"instruction": "ab <image>", "output": "c", "images": ["image.png"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "image.png").write_bytes(encode(56, 84))
    return make_folder(folder)


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(folder: Path, tmp_path: Path, *rows: dict, handler: str = "AlpacaStyleInstructionHandler", **keys: object) -> str:
    prefix = str(tmp_path / "set")
    config = PreprocessConfig(
        input=write(tmp_path / "rows.jsonl", *rows),
        output_prefix=prefix,
        handler_name=handler,
        tokenizer_name_or_path=str(folder),
        **keys,
    )
    run(config)
    return prefix


PARTS = [{"type": "image", "image": "image.png"}, {"type": "text", "text": "ab"}]


@pytest.mark.parametrize(
    ("handler", "row", "where"),
    [
        ("AlpacaStyleInstructionHandler", IMAGE, "column images"),
        ("AlpacaStyleInstructionHandler", {**TEXT, "video": "clip.mp4"}, "column video"),
        (
            "OpenAIInstructionHandler",
            {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "c"}]},
            "message parts",
        ),
        ("GeneralPretrainHandler", {"text": "ab <image>", "images": ["image.png"]}, "column images"),
    ],
)
def test_a_raw_row_with_images_is_refused_and_can_be_skipped(
    folder: Path, tmp_path: Path, handler: str, row: dict, where: str
) -> None:
    text = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}
    text = text if "messages" in row else {"text": "ab"} if "text" in row else TEXT
    with pytest.raises(ValueError, match=rf"row 2.*has images or videos \({where}\).*language_model_only: true"):
        prepare(folder, tmp_path, text, row, handler=handler, language_model_only=True)
    prepare(folder, tmp_path, text, row, handler=handler, language_model_only=True, on_bad_row="skip")


def test_a_number_in_a_column_of_that_name_is_no_image(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path, {**TEXT, "images": 3}, {**TEXT, "images": []}, language_model_only=True)


def check(prefix: str, *, is_text_only: bool = True, **keys: object) -> None:
    for one in list_data_checks(MegatronConfig(stage="sft", data_path=prefix, **keys), is_text_only=is_text_only):
        one()


def test_a_prefix_with_images_is_refused_and_one_of_text_is_read(folder: Path, tmp_path: Path) -> None:
    prefix = prepare(folder, tmp_path, TEXT, IMAGE, image_folder=str(folder))
    check(prefix, is_text_only=False)
    with pytest.raises(ValueError, match=r"megatron_training\.data_path: .*row 1: has images .*language_model_only: true"):
        check(prefix, language_model_only=True)
    # of the same model, so that it has the columns of images, and none in them
    check(prepare(folder, tmp_path, TEXT, TEXT), language_model_only=True)


def test_prompts_with_images_are_refused_raw_and_prepared(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    settings = PromptSettings(language_model_only=True, prompt_type="hf")

    def load(path: str) -> int:
        return len(open_prompts(path, tokenizer, max_prompt_length=64, dataset_additional_keys=(), settings=settings))

    row = {"prompt": "ab <image>", "images": ["image.png"]}
    assert load(write(tmp_path / "text.jsonl", {"prompt": "ab"})) == 1
    with pytest.raises(ValueError, match=r"row 2: has images or videos \(column images\)"):
        load(write(tmp_path / "images.jsonl", {"prompt": "ab"}, row))
    handler, names = "PPOAlpacaStyleInstructionHandler", {"prompt": "prompt", "query": "", "response": ""}
    prefix = prepare(folder, tmp_path, row, handler=handler, image_folder=str(folder), map_keys=names, prompt_type="hf")
    with pytest.raises(ValueError, match=r"row 0: has images or videos, as 1 rows have"):
        load(prefix)


def test_the_form_for_text_in_a_run_file_is_sound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in (CONFIGS / "grpo_qwen35_9b_A2.yaml").read_text().splitlines() if "For text alone" in line)
    words = line.partition(": ")[2].split()
    assert main(["explain", "--config-name", "grpo_qwen35_9b_A2", *words]) == 0, capsys.readouterr().err
    actor = load_run_config("grpo_qwen35_9b_A2", CONFIGS, words).actor_config
    # also where the model and its limits are at hand
    assert actor.language_model_only and actor.image_folder is None
    assert ImageRules.read(folder, MediaLimits.from_keys(actor)) is None


PAIR = {"instruction": "ab", "chosen": "c", "rejected": "d"}
STEPS = {"input": "ab \u043a\u0438", "value": ["+"]}
TURNS = [{"role": "user", "content": [{**PARTS[0], "text": ""}, PARTS[1]]}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("handler", "text", "row", "where"),
    [
        ("AlpacaStyleInstructionHandler", TEXT, IMAGE, "column images"),
        ("AlpacaStyleInstructionHandler", TEXT, {**TEXT, "video": "clip.mp4"}, "column video"),
        ("AlpacaStylePairwiseHandler", PAIR, {**PAIR, "images": ["image.png"]}, "column images"),
        ("AlpacaStyleProcessRewardHandler", STEPS, {**STEPS, "image": {"bytes": None, "path": "image.png"}}, "column image"),
        # a part with an image is not its text
        ("OpenAIInstructionHandler", {"messages": [{**TURNS[0], "content": "ab"}, TURNS[1]]}, {"messages": TURNS}, "content"),
    ],
)
def test_a_model_of_text_is_given_no_row_about_an_image(
    tokenizer_folder: str, tmp_path: Path, handler: str, text: dict, row: dict, where: str
) -> None:
    keys = {"reward_tokens": ("+", "-")} if handler == "AlpacaStyleProcessRewardHandler" else {"prompt_type": "empty"}
    with pytest.raises(ValueError, match=rf"row 2: (message 0 )?has (images or videos )?\(?{where}"):
        prepare(Path(tokenizer_folder), tmp_path, text, row, handler=handler, **keys)
    config = PreprocessConfig(
        input=write(tmp_path / "rows.jsonl", text, row),
        output_prefix=str(tmp_path / "set"),
        handler_name=handler,
        tokenizer_name_or_path=tokenizer_folder,
        on_bad_row="skip",
        **keys,
    )
    counts = run(config).counts
    assert (counts.rows_read, counts.rows_kept) == (2, 1)


@pytest.mark.parametrize("nothing", [[], "", "[]", None, 3, {"bytes": None, "path": None}, [{"bytes": None, "path": None}]])
def test_a_column_without_images_is_no_reason(tokenizer_folder: str, tmp_path: Path, nothing: object) -> None:
    prepare(Path(tokenizer_folder), tmp_path, {**TEXT, "images": nothing}, prompt_type="empty")


def test_a_column_of_that_name_may_be_the_text_or_data(tokenizer_folder: str, tmp_path: Path) -> None:
    text, names = Path(tokenizer_folder), {"prompt": "image", "query": "", "response": "output"}
    prepare(text, tmp_path, {"image": "ab", "output": "c"}, prompt_type="empty", map_keys=names)
    prepare(text, tmp_path, IMAGE, prompt_type="empty", dataset_additional_keys=("images",))


def test_a_prefix_with_images_is_none_of_a_model_of_text(folder: Path, tmp_path: Path) -> None:
    prefix = prepare(folder, tmp_path, TEXT, IMAGE, image_folder=str(folder))
    with pytest.raises(ValueError, match=r"megatron_training\.data_path: .*row 1: has images .* a model of text"):
        check(prefix)


def test_documents_with_a_column_of_images_are_text_for_a_model_of_text(tokenizer_folder: str, tmp_path: Path) -> None:
    row = {"text": "ab", "images": ["image.png"]}
    prepare(Path(tokenizer_folder), tmp_path, row, handler="GeneralPretrainHandler")


def test_prompts_of_a_model_of_text_have_no_images_but_in_a_column_that_they_keep(
    tokenizer_folder: str, folder: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "ab", "images": ["image.png"]})

    def load(path: str, *names: str, is_text_only: bool = True) -> int:
        settings = PromptSettings(prompt_type="empty", is_text_only=is_text_only)
        tokenizer = load_tokenizer(tokenizer_folder)
        return len(open_prompts(path, tokenizer, max_prompt_length=64, dataset_additional_keys=names, settings=settings))

    with pytest.raises(ValueError, match=r"row 1: has images or videos \(column images\), which a model of text"):
        load(path)
    assert load(path, "images") == 1
    assert load(path, is_text_only=False) == 1  # as an audit of a model of images reads its text
    handler, names = "PPOAlpacaStyleInstructionHandler", {"prompt": "prompt", "query": "", "response": ""}
    row = {"prompt": "ab <image>", "images": ["image.png"]}
    prefix = prepare(folder, tmp_path, row, handler=handler, image_folder=str(folder), map_keys=names, prompt_type="hf")
    with pytest.raises(ValueError, match=r"row 0: has images or videos, as 1 rows have, which a model of text"):
        load(prefix)

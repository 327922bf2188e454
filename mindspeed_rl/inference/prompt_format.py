"""Token ids of prompts: plain continuation, a chat template of this project, or the tokenizer's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.data.content_marks import ContentMarks
from mindspeed_rl.data.conversation import Conversation
from mindspeed_rl.data.encoding import TextDecoder, TextEncoder
from mindspeed_rl.data.handlers.base import raise_encoding_errors
from mindspeed_rl.data.images import ImageReader
from mindspeed_rl.data.templates import (
    HF_TEMPLATE,
    THINKING_ARGUMENT,
    HfTemplate,
    Template,
    Thinking,
    Token,
    choose_thinking,
    load_template,
)
from mindspeed_rl.data.tokenizer import set_eos_token
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.files import read_json
from mindspeed_rl.thoughts import (
    find_marks,
    find_template_marks,
    list_mark_tokens,
    opens_thought,
    split_thought,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: tokens at the end of a prompt in which an opened thought has its mark
_MARK_TOKENS = 16


class PromptFormat:
    """The rendering of conversations into prompts, and the tokens that end an answer.

    Attributes:
        name: name of the template; None continues plain text.
        is_chat: True when a template separates the speakers.
        stop_token_ids: the tokenizer's and the template's end tokens, those that generation_config.json names, and the user's.
        thought_marks: texts that open and close a thought.
        decoder: for answers; thought marks stay in the text.
        tools: function schemas of every conversation that has none itself.
        image_reader: image reader of a model of images; None for a model of text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None,
        *,
        template_path: str | None = None,
        thinking: Thinking = "none",
        arguments: Mapping[str, object] | None = None,
        hf_folder: Path | None = None,
        end_tokens: Sequence[str] = (),
        end_ids: Sequence[int] = (),
        image_reader: ImageReader | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Load the template.

        Args:
            tokenizer: tokenizer of the model.
            name: a template's name, "hf" for the tokenizer's own, None for plain text.
            arguments: chat_template_kwargs of the template.
            hf_folder: may contain generation_config.json.
            end_tokens, end_ids: additional tokens that end an answer, as text and by id.
            image_reader: image reader of a model of images.
            vocab_size: tokens that the model can read, where the tokenizer may have others; None for all.

        Raises:
            ValueError: unknown template, or an end token that is not in the vocabulary.
        """
        self.name = name
        self.is_chat = name is not None
        self.tokenizer = tokenizer
        self.tools: Sequence[dict[str, Any]] = ()
        self.image_reader, self._vocab_size = image_reader, vocab_size
        self._thinking: Thinking = choose_thinking(thinking, arguments)
        #: arguments of the template in all renderings
        self.template_arguments: dict[str, object] = dict(arguments or {})
        if self._thinking != "none":
            self.template_arguments[THINKING_ARGUMENT] = self._thinking == "true"
        self._template: Template | HfTemplate | None = None
        stops = {tokenizer.eos_token_id, *_generation_stops(hf_folder)}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        marks = find_template_marks("", added)
        if name is not None:
            self._template = load_template(name, tokenizer, path=template_path, arguments=arguments)
            if self._template.eos_token is not None:
                set_eos_token(tokenizer, self._template.eos_token)
                stops.add(tokenizer.eos_token_id)
            if self._template.can_think:
                marks = self._template.marks
        elif arguments:
            raise ValueError("--chat-template-kwargs needs a chat template: --hf-chat-template")
        elif thinking != "none":
            raise ValueError(f"--enable-thinking {thinking} needs a chat template: --prompt-type or --hf-chat-template")
        self._marks = marks
        self.thought_marks = (marks.texts[0].strip(), marks.texts[1].strip())
        self.decoder = TextDecoder(tokenizer, keep={*self.thought_marks, *list_mark_tokens(added)})
        self._encoder = TextEncoder(tokenizer)
        for token in end_tokens:
            stops.add(self._encoder.special_id(Token(token)))
        if wrong := [str(token) for token in end_ids if not 0 <= token < len(tokenizer)]:
            raise ValueError(f"--stop-token-ids {' '.join(wrong)}: the tokenizer's ids are from 0 to {len(tokenizer) - 1}")
        self.stop_token_ids = tuple(sorted({*stops, *end_ids}))

    def encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Return prompts whose next tokens are the answer.

        Raises:
            ValueError: a conversation needs a template and there is none, the template cannot render it, a text has no tokens,
                it has a token that the model's vocabulary lacks, or images, and the model is one of text.
        """
        prompts = self._encode(conversations)
        for index, prompt in enumerate(prompts):
            if self._vocab_size is not None and (largest := max(prompt, default=0)) >= self._vocab_size:
                text = self.tokenizer.convert_ids_to_tokens(largest)
                raise ValueError(
                    f"prompt {index + 1} has token {largest} ({text!r}), and the model's vocabulary has {self._vocab_size}"
                )
        return prompts

    def _encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        reader = self.image_reader
        if reader is None:
            if any(conversation.images for conversation in conversations):
                raise ValueError("the prompts have images, and the model reads only text; --load a model with a vision_config")
            return self._encode_text(conversations)
        # each image is one token here, and so many in the prompt
        texts = self._encode_text([reader.write_markers(conversation) for conversation in conversations])
        return [reader.expand([(ids, [])], conversation.images)[0][0][0] for ids, conversation in zip(texts, conversations)]

    def decode_videos(self, conversation: Conversation) -> Conversation:
        """Return a conversation whose videos are decoded, for the requests of its answers.

        Raises:
            MalformedRowError: one cannot be decoded, or the model reads no videos.
        """
        if self.image_reader is None or not conversation.images:
            return conversation
        return replace(conversation, images=self.image_reader.decode_videos(conversation.images))

    def _encode_text(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        if self._template is None:
            plain = [self._plain(conversation) for conversation in conversations]
            if [] in plain:
                raise ValueError(f"prompt {plain.index([]) + 1} is empty: its text has no tokens")
            return plain
        complete = [replace(each, tools=each.tools or tuple(self.tools)).as_context() for each in conversations]
        marks = self._content_marks
        renderings = [marks.render(self._template, conversation, self._thinking) for conversation in complete]
        encoded = raise_encoding_errors(self._encoder.encode_renderings(renderings))
        return [[token for source, target in turns for token in (*source, *target)] for turns in encoded]

    @cached_property
    def _content_marks(self) -> ContentMarks:
        assert self._template is not None
        reader, names = self.image_reader, self._encoder.names
        image, video = ("", "") if reader is None else (reader.marker, reader.video_marker)
        return ContentMarks.of_template(self._template, names, self.tokenizer, image_marker=image, video_marker=video)

    def turns(self, *, has_tools: bool) -> ChatTurns:
        """Return the rendering of turns by the template.

        Raises:
            ValueError: the template is missing.
        """
        if self._template is None:
            raise ValueError("--tools and --agent-loop need a chat template: --prompt-type NAME or --hf-chat-template")
        image, video = ("", "") if self.image_reader is None else (self.image_reader.marker, self.image_reader.video_marker)
        options: dict[str, Any] = {"thinking": self._thinking, "image_marker": image, "video_marker": video}
        return ChatTurns(self._template, self.tokenizer, has_tools=has_tools, **options)

    def _plain(self, conversation: Conversation) -> list[int]:
        if conversation.system or len(conversation.messages) != 1 or conversation.tools:
            raise ValueError(
                "a system prompt, tools or several messages need a chat template: --prompt-type NAME or --hf-chat-template"
            )
        text = conversation.messages[0].content
        ids = self.tokenizer(text)["input_ids"]
        if ids[-1:] != [self.tokenizer.eos_token_id]:
            return ids
        # an end token that the tokenizer appends would end the prompt before the answer; one in the text stays
        own = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        while len(ids) > len(own) and ids[-1] == self.tokenizer.eos_token_id and ids[len(ids) - len(own) :] != own:
            ids.pop()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a complete answer, without its end token."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self.decoder.decode(token_ids[:-1] if ended else token_ids)

    def opens_thought(self, prompt_ids: list[int]) -> bool:
        """Return True when the prompt ends inside a thought, so that the answer starts with it."""
        # a mark is a few tokens; the rest of a long prompt need not be decoded
        tail = self.tokenizer.decode(prompt_ids[-_MARK_TOKENS:], skip_special_tokens=False)
        assert isinstance(tail, str)  # a list for a batch
        return tail.rstrip().endswith(self.thought_marks[0]) or opens_thought(tail)

    def split_thought(self, text: str, prompt_ids: list[int]) -> tuple[str, str]:
        """Return (thought, answer) of a complete answer to a prompt; the answer is "" if it ends within the thought."""
        tail = self.tokenizer.decode(prompt_ids[-_MARK_TOKENS:], skip_special_tokens=False)
        assert isinstance(tail, str)  # a list for a batch
        if find_marks(self.thought_marks[0]) is None:  # marks of a template of your own
            return self._marks.split(text, is_open=tail.rstrip().endswith(self.thought_marks[0]))
        return split_thought(text, tail)


def choose_template(tokenizer: PreTrainedTokenizerBase, prompt_type: str | None, hf_chat_template: bool) -> str | None:
    """Return the name of the template that --prompt-type and --hf-chat-template select.

    Raises:
        ValueError: both are given, or the tokenizer has no template of its own.
    """
    if prompt_type is not None and hf_chat_template and prompt_type != HF_TEMPLATE:
        raise ValueError(f"--prompt-type {prompt_type} and --hf-chat-template exclude each other")
    return HF_TEMPLATE if hf_chat_template else prompt_type


def _generation_stops(hf_folder: Path | None) -> list[int]:
    """Read the end tokens in generation_config.json."""
    path = None if hf_folder is None else hf_folder / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path is not None and path.is_file() else None
    return [] if stops is None else stops if isinstance(stops, list) else [stops]

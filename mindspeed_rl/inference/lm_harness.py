"""Any task of `lm-eval` on our engines: `mindspeed-rl evaluate --task lm-eval:NAME`.

Importing this imports the package `lm_eval`, an optional extra (`pip install lm-eval`). Only its published interface is used:
the class `LM`, `TaskManager`, `simple_evaluate` and the two functions that split a long text into windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mindspeed_rl.data.content_marks import ContentMarks, has_hidden
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.templates import HfTemplate
from mindspeed_rl.inference.engine_interface import Engine, Request, collect
from mindspeed_rl.inference.text_stream import cut_at_stop
from mindspeed_rl.rollout.requests import Sampling, sample_seed

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

#: limit of the tokens of an answer whose task has none
_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class _HarnessSettings:
    """Settings of a task.

    Attributes:
        include_path: folder with further definitions of tasks; None for only the package's own.
        num_shots: worked examples; None for the task's default.
        max_samples: limit of the questions; None takes all.
        chat_template: prompts are rendered by the tokenizer's own template.
        template_arguments: further arguments of it.
        max_model_len: limit of the tokens of prompt and answer.
        stop_token_ids: tokens that end an answer.
    """

    include_path: Path | None
    num_shots: int | None
    max_samples: int | None
    chat_template: bool
    template_arguments: Mapping[str, Any]
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    seed: int


def run_harness(engine: Engine, tokenizer: PreTrainedTokenizerBase, name: str, **keys: Any) -> dict[str, dict[str, float]]:
    """Return the metrics of a task, or of each task of a group: name -> metric -> value.

    Args:
        engine: that generates.
        tokenizer: tokenizer of the model.
        name: name of the task.
        keys: keys of `_HarnessSettings`.

    Raises:
        ValueError: the task does not exist, or it requires running programs, which is never allowed here.
    """
    settings = _HarnessSettings(**keys)
    folder = settings.include_path
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if name not in manager.all_tasks:
        where = "" if folder is None else f" and {folder}"
        raise ValueError(f"lm-eval has no task {name} in its own tasks{where}")
    model = _HarnessModel(engine, tokenizer, settings)
    result = simple_evaluate(
        model=model,
        tasks=[name],
        num_fewshot=settings.num_shots,
        limit=settings.max_samples,
        # standard errors are not shown, so nothing is resampled for them
        bootstrap_iters=0,
        log_samples=False,
        apply_chat_template=settings.chat_template,
        task_manager=manager,
        random_seed=settings.seed,
        numpy_random_seed=settings.seed,
        torch_random_seed=settings.seed,
        fewshot_random_seed=settings.seed,
    )
    assert result is not None  # only ranks after the first return nothing
    return {task: _select_numbers(metrics) for task, metrics in result["results"].items()}


def _select_numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that are numbers, without the suffix of the filter `none`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "_stderr" not in name
    }


class _HarnessModel(LM):
    """An engine as a model of lm-eval: texts in, log-likelihoods and texts out."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: _HarnessSettings) -> None:
        super().__init__()
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        # vLLM needs room for a token after those that it scores
        self._max_len = settings.max_model_len - 1
        # as in lm-eval's own models, the first token of a text is an empty context
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        assert isinstance(prefix, int), "the tokenizer has neither a bos nor an eos token"
        self._prefix = prefix
        self._encoder = TextEncoder(tokenizer)

    @cached_property
    def _marks(self) -> ContentMarks:
        return ContentMarks.of_template(HfTemplate(self._tokenizer), self._encoder.names, self._tokenizer)

    def loglikelihood(self, requests: Sequence[Instance], **unused: object) -> list[tuple[float, bool]]:
        """Return (log-prob of the continuation, True if it is the greedy one) of each (context, continuation)."""
        return self._score([self._encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], **unused: object) -> list[float]:
        """Return the log-prob of each text; one longer than the context is split into windows, each token scored once."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            # a window has one token more than it predicts, before them
            parts = get_rolling_token_windows(self._encode(text), self._prefix, self._max_len - 1, 1)
            disjoint = [make_disjoint_window(pair) for pair in parts]
            windows += disjoint
            counts.append(len(disjoint))
        scores = iter(self._score(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], **unused: object) -> list[str]:
        """Return an answer to each (context, generation keys), without the text that ended it."""
        answers = [""] * len(requests)
        groups: dict[tuple[Sampling, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self._read_sampling(request.args[1]), []).append(index)
        for (sampling, stops), members in groups.items():
            room = self._settings.max_model_len - sampling.max_tokens
            if room < 1:
                raise ValueError(
                    f"answers of {sampling.max_tokens} tokens leave no room for a prompt in {self._settings.max_model_len} "
                    "(--max-length)"
                )
            # the question is at the end of a prompt, so tokens at its start are dropped
            prompts = [self._encode(requests[index].args[0])[-room:] or [self._prefix] for index in members]
            batch = [Request(ids, sample_seed(self._settings.seed, 0, index, 0)) for index, ids in zip(members, prompts)]
            for index, answer in zip(members, collect(self._engine.stream(batch, sampling, stops), len(members))):
                ids = [token for token in answer.token_ids if token not in sampling.stop_token_ids]
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
                assert isinstance(text, str)  # a list for a batch
                answers[index] = cut_at_stop(text, stops)
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the conversation by the tokenizer's own template."""
        text = self._tokenizer.apply_chat_template(
            [dict(self._marks.hide_message(message)) for message in chat_history],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._settings.template_arguments,
        )
        assert isinstance(text, str)  # by tokenize=False
        return text

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template itself, for lm-eval's records."""
        return str(self._tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's records."""
        return str(self._tokenizer.name_or_path).replace("/", "__")

    # ------------------------------------------------------------------ tokens

    def _encode(self, text: str) -> list[int]:
        """Encode a text; a prompt in a chat template already contains its special tokens."""
        if self._settings.chat_template and has_hidden(text):
            return self._encoder.encode_hidden(text)
        return self._tokenizer.encode(text, add_special_tokens=not self._settings.chat_template)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Split the tokens of the joined text into the tokens of both parts; blanks between the two belong to the second."""
        if not context:
            return [self._prefix], self._tokenizer.encode(continuation, add_special_tokens=False)
        bare = context.rstrip()
        full, first = self._encode(context + continuation), self._encode(bare)
        return full[: len(first)], full[len(first) :]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        sequences, starts = [], []
        for context, continuation in pairs:
            # the continuation is at the end: a long context loses its first tokens
            ids = (context + continuation)[-self._max_len :]
            sequences.append(ids)
            # no token comes before the first one, to predict it by
            starts.append(max(len(ids) - len(continuation), 1))
        scores = self._engine.score(sequences, starts)
        return [(sum(value for value, _ in tokens), all(greedy for _, greedy in tokens)) for tokens in scores]

    def _read_sampling(self, keys: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
        until = keys.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        temperature = float(keys.get("temperature", 0.0)) if keys.get("do_sample", True) else 0.0
        max_tokens = int(keys.get("max_gen_toks", keys.get("max_new_tokens", _MAX_NEW_TOKENS)))
        sampling = Sampling(temperature, max_tokens, self._settings.stop_token_ids)
        if temperature:
            sampling = replace(sampling, top_p=float(keys.get("top_p", 1.0)), top_k=int(keys.get("top_k", -1)))
        return sampling, tuple(text for text in stops if text)

"""Any task of `lm-eval` on our engines: `mindspeed-rl evaluate --task lm-eval:NAME`.

Importing this imports the package `lm_eval`, an optional extra (`pip install lm-eval`). Only its published interface is used:
the class `LM`, `TaskManager`, `simple_evaluate` and the two functions that cut a long text into windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mindspeed_rl.inference.engine_interface import Engine, Request, collect
from mindspeed_rl.inference.text_stream import cut_at
from mindspeed_rl.rollout.requests import Sampling, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: most tokens of an answer whose task does not say
_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class HarnessSettings:
    """What holds for a task.

    Attributes:
        include_path: folder with definitions of tasks besides those of the package; None for those alone.
        num_shots: worked examples; None for the task's own number.
        max_samples: most questions; None takes all.
        chat_template: prompts are put into the tokenizer's own template.
        max_model_len: most tokens of prompt and answer.
        stop_token_ids: tokens that end an answer.
    """

    include_path: Path | None
    num_shots: int | None
    max_samples: int | None
    chat_template: bool
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    seed: int


def run_harness(engine: Engine, tokenizer: PreTrainedTokenizerBase, name: str, **keys: Any) -> dict[str, dict[str, float]]:
    """The metrics of a task, or of each task of a group: name -> metric -> value.

    Args:
        keys: of `HarnessSettings`.

    Raises:
        ValueError: there is no such task, or it asks for programs to be run, which is never allowed here.
    """
    settings = HarnessSettings(**keys)
    folder = settings.include_path
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if name not in manager.all_tasks:
        where = "" if folder is None else f" and {folder}"
        raise ValueError(f"lm-eval has no task {name} in its own tasks{where}")
    model = HarnessModel(engine, tokenizer, settings)
    result = simple_evaluate(
        model=model,
        tasks=[name],
        num_fewshot=settings.num_shots,
        limit=settings.max_samples,
        # standard errors are not shown, so nothing need be resampled for them
        bootstrap_iters=0,
        log_samples=False,
        apply_chat_template=settings.chat_template,
        task_manager=manager,
        random_seed=settings.seed,
        numpy_random_seed=settings.seed,
        torch_random_seed=settings.seed,
        fewshot_random_seed=settings.seed,
    )
    assert result is not None  # only ranks beside the first return nothing
    return {task: _numbers(metrics) for task, metrics in result["results"].items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, under their bare names where no filter but `none` was applied."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "_stderr" not in name
    }


class HarnessModel(LM):
    """An engine as lm-eval sees a model: texts in, log-likelihoods and texts out."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: HarnessSettings) -> None:
        super().__init__()
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        # vLLM wants room for a token behind what it scores
        self._longest = settings.max_model_len - 1
        # as lm-eval's own models do, what begins a text stands for an empty context
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        assert isinstance(prefix, int), "the tokenizer has neither a bos nor an eos token"
        self._prefix = prefix

    def loglikelihood(self, requests: Sequence[Any], **unused: Any) -> list[tuple[float, bool]]:
        """(log-prob of the continuation, whether it is the greedy one) of each (context, continuation)."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **unused: Any) -> list[float]:
        """Log-prob of each whole text; one longer than the model reads is cut into windows, each token scored once."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            # beside the tokens that it predicts a window has one in front of them
            cut = get_rolling_token_windows(self._encode(text), self._prefix, self._longest - 1, 1)
            found = [make_disjoint_window(pair) for pair in cut]
            windows += found
            counts.append(len(found))
        scores = iter(self._score(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], **unused: Any) -> list[str]:
        """An answer to each (context, how to generate), without the text that ended it."""
        answers = [""] * len(requests)
        groups: dict[tuple[Sampling, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self._how(request.args[1]), []).append(index)
        for (sampling, stops), members in groups.items():
            room = self._settings.max_model_len - sampling.max_tokens
            if room < 1:
                raise ValueError(
                    f"answers of {sampling.max_tokens} tokens leave no room for a prompt in {self._settings.max_model_len} "
                    "(--max-length)"
                )
            # what is asked stands at the end of a prompt, so its beginning goes
            prompts = [self._encode(requests[index].args[0])[-room:] or [self._prefix] for index in members]
            asked = [Request(ids, sample_seed(self._settings.seed, 0, index, 0)) for index, ids in zip(members, prompts)]
            for index, answer in zip(members, collect(self._engine.stream(asked, sampling, stops), len(asked))):
                ids = [token for token in answer.token_ids if token not in sampling.stop_token_ids]
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
                assert isinstance(text, str)  # a list for a batch
                answers[index] = cut_at(text, stops)
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the tokenizer's own template."""
        text = self._tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)  # asked for by tokenize=False
        return text

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template itself, for lm-eval's records."""
        return str(self._tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's records."""
        return str(self._tokenizer.name_or_path).replace("/", "__")

    # ------------------------------------------------------------------ tokens

    def _encode(self, text: str) -> list[int]:
        """A prompt in a chat template brings its special tokens along."""
        return self._tokenizer.encode(text, add_special_tokens=not self._settings.chat_template)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both, cut where the tokens of the whole text cut them; blanks between the two belong to the second."""
        if not context:
            return [self._prefix], self._tokenizer.encode(continuation, add_special_tokens=False)
        bare = context.rstrip()
        whole, first = self._encode(context + continuation), self._encode(bare)
        return whole[: len(first)], whole[len(first) :]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        sequences, starts = [], []
        for context, continuation in pairs:
            # the continuation is at the end: a long context loses its beginning
            ids = (context + continuation)[-self._longest :]
            sequences.append(ids)
            # nothing stands in front of the first token to predict it by
            starts.append(max(len(ids) - len(continuation), 1))
        found = self._engine.score(sequences, starts)
        return [(sum(value for value, _ in tokens), all(greedy for _, greedy in tokens)) for tokens in found]

    def _how(self, keys: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
        until = keys.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        temperature = float(keys.get("temperature", 0.0)) if keys.get("do_sample", True) else 0.0
        most = int(keys.get("max_gen_toks", keys.get("max_new_tokens", _MAX_NEW_TOKENS)))
        sampling = Sampling(temperature, most, self._settings.stop_token_ids)
        if temperature:
            sampling = replace(sampling, top_p=float(keys.get("top_p", 1.0)), top_k=int(keys.get("top_k", -1)))
        return sampling, tuple(text for text in stops if text)

"""The audit of a run's reward functions: what a cheat would earn next to an honest answer.

Responses are scored by the run's own functions, weights, penalties and limits, in the pool of processes that the trainer uses.
A response cheats where it earns at least half of the way from a wrong answer to the honest one, while no stricter check
accepts it: the final answer is the label and nothing else, or the functions, the judge or the environment of the group `audit`
give half of their full score. Where no label is an answer (word counts, tests, judges), the way is that from the lowest to the
highest reward that any response has got.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from typing import TYPE_CHECKING, Any

from mindspeed_rl.audit.cheats import CHEATS, FORMS, LABEL_CHEATS, MUTATIONS, WHOLE, Case, bind_form, make_wrong
from mindspeed_rl.audit.judges import JudgedRow
from mindspeed_rl.audit.marked import MarkedResponses
from mindspeed_rl.audit.report import AuditReport, Section
from mindspeed_rl.rewards.answers.extraction import extract_final_answer
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings, select_reward_functions
from mindspeed_rl.run import Run
from mindspeed_rl.run.audit_rewards import derive_audit_rewards, derive_audit_settings
from mindspeed_rl.run.machine import check_judges, check_server
from mindspeed_rl.texts import cut_middle
from mindspeed_rl.thoughts import remove_thought
from mindspeed_rl.tools.environment_check import ENVIRONMENT_CHECK, TURNS, is_playable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: part of the way to the honest reward from which a response cheats
_GAIN = 0.5
#: rounds of the search, and responses that are combined in one
_ROUNDS, _COMBINED = 2, 5
#: turns of an episode without a limit
_TURNS = 8
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LEAD = re.compile(r"(?:####|answer(?: is)?\s*:?|答案[是为：:]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Response:
    """A response that is scored.

    Attributes:
        kind: honest, wrong, cheat or mutation.
        name: title of the cheat or mutation, or the form of an honest answer.
        variant: index among the variants of a name.
        orders: the response, or the same with its answers in several orders, of which the worst counts.
    """

    kind: str
    name: str
    variant: int
    orders: tuple[str, ...]


#: title of a model's own responses
SAMPLE = "a sample of the model"


@dataclass
class Outcome:
    """Rewards of the responses of one name, over the rows.

    Attributes:
        rows: rows that were attacked, and that one of the responses has cheated.
        rewards: the highest reward of each row.
        example: the shortest response that cheated, with its row and reward.
    """

    rows: set[str] = field(default_factory=set)
    cheated: set[str] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)
    example: tuple[str, str, float] | None = None

    @property
    def share(self) -> float:
        """Share of the rows that it cheats."""
        return len(self.cheated) / max(1, len(self.rows))

    def add(self, where: str, text: str, reward: float, *, cheats: bool) -> None:
        """Add the reward of a response."""
        self.rows.add(where)
        self.rewards[where] = max(reward, self.rewards.get(where, -math.inf))
        if cheats:
            self.cheated.add(where)
            if self.example is None or len(text) < len(self.example[1]):
                self.example = where, text, reward


@dataclass
class RewardAudit:
    """Findings of an audit.

    Attributes:
        functions: names of the reward functions that were audited.
        skipped: sentences about what was not audited.
        form: form of honest answers, and their mean reward; None where no label is an answer.
        wrong: mean reward of wrong answers in this form.
        cheats, mutations: by title.
        failures: kind of failure -> number of responses, and an example.
        num_rows: rows that were attacked.
        is_flat: all responses to a row have earned the same.
        marked: what responses that people have marked earn; None without such.
    """

    functions: list[str]
    skipped: list[str]
    form: tuple[str, float] | None = None
    wrong: float | None = None
    cheats: dict[str, Outcome] = field(default_factory=dict)
    mutations: dict[str, Outcome] = field(default_factory=dict)
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    num_rows: int = 0
    num_responses: int = 0
    is_flat: bool = False
    marked: MarkedResponses | None = None

    @property
    def worst(self) -> float:
        """Largest share of rows that one cheat, or one label that is wrong in every task, gets through."""
        wrong = [self.mutations[one.title].share for one in MUTATIONS if one.is_wrong and one.title in self.mutations]
        return max([*(outcome.share for outcome in self.cheats.values()), *wrong], default=0.0)

    @property
    def failed_share(self) -> float:
        """Share of the responses that have no reward."""
        return sum(count for count, _ in self.failures.values()) / max(1, self.num_responses)

    def passes(self, bound: float) -> bool:
        """Return True where no cheat and no failure is more frequent than the bound, and rewards tell responses apart."""
        tricked = 0.0 if self.marked is None else self.marked.paid_share
        return max(self.worst, self.failed_share, tricked) <= bound and not self.is_flat

    def describe(self, bound: float) -> AuditReport:
        """Return the audit as a report.

        Args:
            bound: largest share of rows that a cheat may get through.
        """
        honest = "no label is an answer" if self.form is None else f"{self.form[1]:.3g} ({self.form[0]})"
        facts = {
            "functions": ", ".join(self.functions),
            "rows": f"{self.num_rows}, with {self.num_responses:,} responses",
            "honest answer": honest,
            "wrong answer": "" if self.wrong is None else f"{self.wrong:.3g} in the same form",
            "without score": f"{self.failed_share:.1%} of the responses" if self.failures else "",
        }
        won = {title: one for title, one in self.cheats.items() if one.cheated}
        won = dict(sorted(won.items(), key=lambda item: -item[1].share))
        known = {cheat.title: cheat.advice for cheat in (*CHEATS, *LABEL_CHEATS)}
        known[SAMPLE] = "the model finds it without training: compare only the final answer, and the whole of it."
        advice = [f"{title}: {known[title]}" for title in won if title in known]
        shown = [one for one in MUTATIONS if one.title in self.mutations and self.mutations[one.title].cheated]
        if any(one.is_wrong for one in shown):
            advice.append("labels: compare the whole answer; a reward that accepts these teaches wrong ones.")
        if self.is_flat:
            advice.append(
                "reward: is a label the answer that the functions read? mindspeed-rl audit data tries each with every label."
            )
        verdict = f"the best cheat gets through on {self.worst:.0%} of {self.num_rows} rows (bound {bound:.0%})"
        if self.is_flat:
            verdict = "no response to a row earns more than another, not even its label"
        if self.failures:
            verdict += f"; {self.failed_share:.1%} of the responses have no score"
        if self.marked is not None:
            verdict += f"; {self.marked.paid_share:.0%} of what people call wrong is paid for"
        return AuditReport(
            f"audit of the reward: {', '.join(self.functions)}",
            verdict,
            self.passes(bound),
            [
                Section("Reward", ("", ""), [(name, text) for name, text in facts.items() if text]),
                Section(
                    "Cheats that earn a reward",
                    ("cheat", "rows", "reward", "smallest example"),
                    [_describe(title, outcome) for title, outcome in won.items()],
                    empty="none",
                ),
                Section(
                    "Changed labels that are accepted",
                    ("change", "rows", "reward", "smallest example"),
                    [
                        _describe(one.title if one.is_wrong else f"{one.title} (may be right)", self.mutations[one.title])
                        for one in shown
                    ],
                    empty="none",
                ),
                *([] if self.marked is None else self.marked.list_sections()),
                Section(
                    "Responses without a score",
                    ("kind", "number", "example"),
                    [(state, str(count), text) for state, (count, text) in self.failures.items()],
                ),
                Section("Not audited", ("",), [(text,) for text in self.skipped]),
                Section("What to change", ("",), [(text,) for text in advice]),
            ],
        )

    def encode(self, bound: float) -> dict[str, object]:
        """Return the audit as plain values."""

        def values(outcomes: Mapping[str, Outcome]) -> dict[str, object]:
            return {
                title: {"rows": len(one.rows), "cheated": len(one.cheated), "share": one.share, "example": one.example}
                for title, one in outcomes.items()
            }

        return {
            "functions": self.functions,
            "not_audited": self.skipped,
            "rows": self.num_rows,
            "responses": self.num_responses,
            "honest": None if self.form is None else {"form": self.form[0], "reward": self.form[1], "wrong": self.wrong},
            "cheats": values(self.cheats),
            "mutations": values(self.mutations),
            "failures": {state: count for state, (count, _) in self.failures.items()},
            "worst": self.worst,
            **({} if self.marked is None else {"marked": self.marked.encode()}),
            "bound": bound,
            "passes": self.passes(bound),
        }


def _describe(title: str, outcome: Outcome) -> tuple[str, str, str, str]:
    assert outcome.example is not None  # shown only where it cheated
    where, text, reward = outcome.example
    share = f"{len(outcome.cheated)} of {len(outcome.rows)}"
    mean = statistics.fmean(outcome.rewards.values())
    return title, share, f"{mean:.3g}", f"{where}: {cut_middle(text)!r} earns {reward:.3g}"


def commits_to(response: str, label: str | None) -> bool:
    """Return True where the final answer of a response is the label and nothing else: the stricter check.

    Texts are compared character for character, after Unicode's compatibility form, without case, spaces and a full stop.
    """
    if label is None:
        return False
    text = remove_thought(response)
    if tagged := _TAGGED.findall(text):
        text = tagged[-1] if len(set(tagged)) == 1 else ""
    if boxes := _BOX.findall(text):
        text = boxes[-1] if len(set(boxes)) == 1 else ""
    elif leads := list(_LEAD.finditer(text)):
        text = text[leads[-1].end() :]
    return _to_plain(text) == _to_plain(label)


def ends_with(response: str, label: str | None) -> bool:
    """Return True where the final answer of a response in prose is the label: the stricter check of single texts."""
    if label is None or commits_to(response, label):
        return label is not None
    return _to_plain(extract_final_answer(remove_thought(response))) == _to_plain(label)


def _to_plain(text: str) -> str:
    text = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip("$").removesuffix(".").replace("\\left", "").replace("\\right", "")


class _Scorer:
    """Scores responses as the trainer does, and counts those without a score."""

    def __init__(self, run: Run, pool: RewardPool, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, Any]) -> None:
        self._pool, self.tokenizer, self._columns = pool, tokenizer, columns
        self._limit, self._reads_output = run.config.response_limit, run.rl.verifier_reads == "output"
        # an environment of several turns gets the same text again, until its episode ends
        self._num_turns = (run.rl.max_turns or _TURNS) if run.rl.multi_turn_enable else 1
        self.num_responses = 0
        self._failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def score(self, pairs: Sequence[tuple[Case, str]]) -> list[float | None]:
        """Return the total reward of each response; None where there is none."""
        results = self._pool.score([self._make_sample(case, text) for case, text in pairs])
        self.num_responses += len(pairs)
        for (case, text), result in zip(pairs, results):
            if result.failed:
                self._failures[result.state] += 1
                self._examples.setdefault(result.state, f"{case.where}: {cut_middle(text)!r}: {cut_middle(result.error)}")
        return [self._read_total(result) for result in results]

    @staticmethod
    def _read_total(result: RewardResult) -> float | None:
        return result.total if not result.failed else None

    @property
    def failures(self) -> dict[str, tuple[int, str]]:
        """Kind of failure -> number of responses, and an example."""
        return {state: (count, self._examples[state]) for state, count in self._failures.most_common()}

    def _make_sample(self, case: Case, text: str) -> RewardSample:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_cut = len(ids) > self._limit
        if is_cut:  # as generation ends
            ids = ids[: self._limit]
            decoded = self.tokenizer.decode(ids, skip_special_tokens=False)
            assert isinstance(decoded, str)  # a list for a batch
            text = decoded
        return RewardSample(
            prompt=case.prompt,
            response=text,
            prompt_ids=case.prompt_ids,
            response_ids=ids,
            label=case.label,
            columns={
                **case.columns,
                **self._columns,
                **({"output": text} if self._reads_output else {}),
                **({TURNS: [text] * self._num_turns} if self._num_turns > 1 else {}),
            },
            truncated=is_cut,
            max_response_length=self._limit,
        )


def select_functions(run: Run) -> tuple[list[str], list[float], list[str]]:
    """Return names and weights of the functions that can be audited here, and a sentence for each part that cannot.

    Raises:
        ValueError: none can be.
    """
    names, weights = select_reward_functions(run.rl)
    skipped = []
    if "judge" in names and run.rl.judge_url is not None:
        try:
            skipped += check_judges(run.rl)
        except ValueError as error:
            skipped.append(f"the judge: {error}")
            place = names.index("judge")
            del names[place], weights[place]
    if run.rl.served_judge is not None:
        skipped.append("the judge that the run serves: its model is loaded with the run; audit it with rl_config.judge_url.")
    if run.config.reward_config is not None:
        skipped.append("the reward model: it needs a device.")
    if is_playable(run.rl):
        names.append(ENVIRONMENT_CHECK)
        weights.append(run.rl.trajectory_reward_weight)
    elif run.rl.agent_loop_name in ("environment", "program", "roles"):
        skipped.append(
            "rewards of the environment: it plays samples itself, or has several roles, and judges no response of another one."
        )
    if not names:
        raise ValueError(f"audit reward: no reward function of this run can be audited here. {' '.join(skipped)}".strip())
    return names, weights, skipped


def make_settings(run: Run, rewards: RewardSettings | None = None) -> RewardSettings:
    """Return the settings of rewards for an audit, which counts failures itself.

    Args:
        rewards: settings of the stricter check; None for the run's own rewards.
    """
    settings = rewards or RewardSettings.from_config(run.rl, max_tokens=run.config.response_limit)
    return replace(settings, reward_failure_limit=1.0, reward_failure_policy="drop")


def audit_reward(
    run: Run,
    cases: Sequence[Case],
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Mapping[str, Any] | None = None,
    samples: Mapping[str, Sequence[str]] | None = None,
    marked: Sequence[JudgedRow] = (),
    report: Callable[[str], None] = lambda _: None,
) -> RewardAudit:
    """Attack the reward functions of a run on some of its rows.

    Args:
        cases: the rows.
        columns: further columns of every response, as an agent loop adds them.
        samples: place of a row -> responses of a model, equally many to each; they are attacks and parts of the search.
        marked: responses that people have called right or wrong.
        report: takes a line about what is done.

    Raises:
        ValueError: a function does not load, or scores no response of the first row.
    """
    names, weights, skipped = select_functions(run)
    shown = ["the environment" if name == ENVIRONMENT_CHECK else name for name in names]
    audit = RewardAudit(shown, skipped, num_rows=len(cases))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(RewardPool(names, weights, settings=make_settings(run)))
        scorer = _Scorer(run, pool, tokenizer, columns or {})
        strict = _open_strict(run, tokenizer, columns or {}, audit, stack)
        _check_first(scorer, cases[0])
        form = _choose_form(scorer, cases, audit)
        responses = {case.where: _list_responses(case, form) for case in cases}
        if samples is not None:
            # without an answer as its label nothing tells an honest sample from another
            for case in cases:
                texts = () if case.answer is None else samples[case.where]
                responses[case.where] += [Response("cheat", SAMPLE, index, (text,)) for index, text in enumerate(texts)]
        report(f"{sum(map(len, responses.values())):,} responses to {len(cases)} rows")
        scored = _score_all(scorer, cases, responses)
        ways = {case.where: _find_way(scored[case.where]) for case in cases}
        is_flat = all(low == high for low, high in ways.values())
        # without an answer as its label no response is known to be right
        audit.is_flat = is_flat and any(case.answer is not None for case in cases)
        if is_flat and not audit.is_flat:
            skipped.append("honest answers: no label is one, and no response here earns more; --model adds samples.")
        _count(audit, cases, scored, ways, strict)
        _search(audit, scorer, cases, scored, ways, strict, report)
        if known := [row for row in marked if row.human is not None]:
            audit.marked = _score_marked(scorer, known, math.fsum(weight for weight in weights if weight > 0))
        audit.num_responses, audit.failures = scorer.num_responses, scorer.failures
    return audit


def _score_marked(scorer: _Scorer, rows: Sequence[JudgedRow], full: float) -> MarkedResponses:
    """Return what responses of a file earn."""
    cases = []
    for row in rows:
        sample = row.sample
        prompt_ids = scorer.tokenizer.encode(sample.prompt, add_special_tokens=False)
        case = Case(row.where, sample.prompt, sample.prompt, prompt_ids, sample.label, sample.columns)
        cases.append((case, sample.response))
    places = [(case.where, text) for case, text in cases]
    return MarkedResponses(places, [row.human == (True,) for row in rows], scorer.score(cases), full or 1.0)


class _Strict:
    """The stricter check of the group `audit`, which scores the responses that a reward pays for, each once."""

    def __init__(self, scorer: _Scorer, scale: float) -> None:
        self._scorer, self._scale = scorer, scale
        self._known: dict[tuple[str, str], bool] = {}

    def accepts(self, case: Case, text: str) -> bool:
        """Return True where it gives half of its full score."""
        key = case.where, text
        if key not in self._known:
            (score,) = self._scorer.score([(case, text)])
            self._known[key] = score is not None and score >= _GAIN * self._scale
        return self._known[key]


def _open_strict(
    run: Run, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, Any], audit: RewardAudit, stack: contextlib.ExitStack
) -> _Strict | None:
    """Open the stricter check of a run until the stack is closed; None where it has none, or its judge cannot be reached."""
    keys = run.config.audit
    if not keys.has_check:
        return None
    if keys.judge_url is not None:
        try:
            check_server(keys.judge_url, "audit.judge_url")
        except ValueError as error:
            audit.skipped.append(f"the stricter check: {error}")
            return None
    names, weights = select_reward_functions(derive_audit_rewards(run.rl, keys))
    settings = make_settings(run, derive_audit_settings(run.rl, keys, max_tokens=run.config.response_limit))
    pool = stack.enter_context(RewardPool(names, weights, settings=settings))
    return _Strict(_Scorer(run, pool, tokenizer, columns), math.fsum(weight for weight in weights if weight > 0))


def _check_first(scorer: _Scorer, case: Case) -> None:
    """Raise ValueError where no response of a row has a score: a function that hangs would hang for each."""
    texts = [form(case.answer or "1") for form in list(FORMS.values())[:2]]
    if all(score is None for score in scorer.score([(case, text) for text in texts])) and scorer.failures:
        _, example = next(iter(scorer.failures.values()))
        raise ValueError(f"the reward functions score no response to the first row; {example}")


def _choose_form(scorer: _Scorer, cases: Sequence[Case], audit: RewardAudit) -> str:
    """Return the form whose honest answers earn most over wrong ones, and record their rewards where it is more."""
    answered = [(case, case.answer) for case in cases if case.answer is not None]
    best: tuple[float, float, str] | None = None
    names = [*FORMS, *([WHOLE] if any(case.label != answer for case, answer in answered) else [])]
    if not answered:
        return next(iter(FORMS))
    for name in names:
        forms = [(case, answer, bind_form(name, case)) for case, answer in answered]
        honest = _mean(scorer.score([(case, form(answer)) for case, answer, form in forms]))
        wrong = _mean(scorer.score([(case, form(make_wrong(answer))) for case, answer, form in forms]))
        if honest is None or wrong is None:
            continue
        # of equal ways the one to the higher reward
        if best is None or (honest - wrong, honest) > (best[0], best[0] + best[1]):
            best = honest - wrong, wrong, name
    if best is None or best[0] <= 0:
        return next(iter(FORMS))
    audit.form, audit.wrong = (best[2], best[0] + best[1]), best[1]
    return best[2]


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return statistics.fmean(known) if known else None


def _list_responses(case: Case, name: str) -> list[Response]:
    form, responses = bind_form(name, case), list[Response]()
    # a cheat must not see what else is in the label
    blind = form if name != WHOLE else FORMS[next(iter(FORMS))]
    if (answer := case.answer) is not None:
        responses.append(Response("honest", "", 0, (form(answer),)))
        responses.append(Response("wrong", "", 0, (form(make_wrong(answer)),)))
        for mutation in MUTATIONS:
            changed = mutation.change(answer)
            if changed is not None and changed != answer:
                responses.append(Response("mutation", mutation.title, 0, (form(changed),)))
    for cheat, used in (*((cheat, blind) for cheat in CHEATS), *((cheat, form) for cheat in LABEL_CHEATS)):
        attempts = dict.fromkeys((one,) if isinstance(one, str) else one for one in cheat.write(case, used))
        responses += [Response("cheat", cheat.title, index, orders) for index, orders in enumerate(attempts)]
    return responses


Scored = list[tuple[Response, float]]
Check = Callable[[str, str | None], bool]


def _score_all(scorer: _Scorer, cases: Sequence[Case], responses: Mapping[str, list[Response]]) -> dict[str, Scored]:
    attempts = [(case, response) for case in cases for response in responses[case.where]]
    rewards = _score_worst(scorer, [(case, response.orders) for case, response in attempts])
    scored: dict[str, Scored] = {case.where: [] for case in cases}
    for (case, response), reward in zip(attempts, rewards):
        if reward is not None:
            scored[case.where].append((response, reward))
    return scored


def _score_worst(scorer: _Scorer, attempts: Sequence[tuple[Case, tuple[str, ...]]]) -> list[float | None]:
    """Return the lowest reward of the orders of each response; None where one of them has none."""
    scores = iter(scorer.score([(case, text) for case, orders in attempts for text in orders]))
    worst = list[float | None]()
    for _, orders in attempts:
        rewards = [next(scores) for _ in orders]
        known = [reward for reward in rewards if reward is not None]
        worst.append(min(known) if len(known) == len(rewards) else None)
    return worst


def _find_way(scored: Scored) -> tuple[float, float]:
    """Return the rewards of a wrong and the honest answer; where that is not higher, of the lowest and highest response."""
    honest = [score for response, score in scored if response.kind == "honest"]
    wrong = [score for response, score in scored if response.kind == "wrong"]
    if honest and wrong and honest[0] > wrong[0]:
        return wrong[0], honest[0]
    scores = [score for _, score in scored]
    return min(scores, default=0.0), max(scores, default=0.0)


def _is_cheat(
    case: Case, orders: Sequence[str], score: float, way: tuple[float, float], accepts: Check, strict: _Strict | None
) -> bool:
    """Return True for a response that earns half of the way and does not pass a stricter check in any order."""
    low, high = way
    if high <= low or score < low + _GAIN * (high - low):
        return False
    return not any(accepts(text, case.answer) or (strict is not None and strict.accepts(case, text)) for text in orders)


def _choose_check(kind: str, orders: Sequence[str]) -> Check:
    """Return the stricter check of a response: a single text whose last answer happens to be the label is right by chance."""
    return ends_with if kind == "cheat" and len(orders) == 1 else commits_to


def _count(
    audit: RewardAudit,
    cases: Sequence[Case],
    scored: Mapping[str, Scored],
    ways: Mapping[str, tuple[float, float]],
    strict: _Strict | None,
) -> None:
    groups = {"cheat": audit.cheats, "mutation": audit.mutations}
    for case in cases:
        way = ways[case.where]
        for response, score in scored[case.where]:
            if response.kind in groups:
                outcome = groups[response.kind].setdefault(response.name, Outcome())
                is_cheat = _is_cheat(
                    case, response.orders, score, way, _choose_check(response.kind, response.orders), strict
                )
                outcome.add(case.where, response.orders[0], score, cheats=is_cheat)


def _search(
    audit: RewardAudit,
    scorer: _Scorer,
    cases: Sequence[Case],
    scored: Mapping[str, Scored],
    ways: Mapping[str, tuple[float, float]],
    strict: _Strict | None,
    report: Callable[[str], None],
) -> None:
    """Combine the responses that earn most without a label, and keep combinations that earn more than their parts."""
    known = {cheat.title for cheat in CHEATS} | {SAMPLE}
    texts: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    means: dict[tuple[str, ...], list[float]] = {}
    for case in cases:
        for response, score in scored[case.where]:
            if response.name in known:
                key = (f"{response.name} {response.variant + 1}",)
                texts.setdefault(key, {})[case.where] = response.orders
                means.setdefault(key, []).append(_gain(score, ways[case.where]))
    gains = {key: statistics.fmean(values) for key, values in means.items() if len(values) == len(cases)}
    for turn in range(_ROUNDS):
        best = sorted(gains, key=lambda key: -gains[key])[:_COMBINED]
        new = {one + other: (one, other) for one, other in permutations(best, 2) if one + other not in texts}
        report(f"search, round {turn + 1}: {len(new)} combinations")
        for key, (one, other) in new.items():
            texts[key] = {case.where: _join(texts[one][case.where], texts[other][case.where]) for case in cases}
            scores = _score_worst(scorer, [(case, texts[key][case.where]) for case in cases])
            rewards = [(case, score) for case, score in zip(cases, scores) if score is not None]
            if len(rewards) < len(cases):
                continue
            gains[key] = statistics.fmean(_gain(score, ways[case.where]) for case, score in rewards)
            if gains[key] <= max(gains[one], gains[other]):
                continue
            outcome = audit.cheats.setdefault(f"together: {' + '.join(key)}", Outcome())
            for case, score in rewards:
                orders = texts[key][case.where]
                is_cheat = _is_cheat(case, orders, score, ways[case.where], _choose_check("cheat", orders), strict)
                outcome.add(case.where, orders[0], score, cheats=is_cheat)


def _join(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Return two responses in one, in as many orders as the longer of them has."""
    return tuple(f"{one[place % len(one)]}\n{other[place % len(other)]}" for place in range(max(len(one), len(other))))


def _gain(score: float, way: tuple[float, float]) -> float:
    return (score - way[0]) / (way[1] - way[0]) if way[1] > way[0] else 0.0


def list_cases(rows: Iterator[Case], count: int, seed: int = 0) -> list[Case]:
    """Return some of the first rows, chosen by a seed, in their order."""
    first = list(islice(rows, 2000))
    chosen = random.Random(seed).sample(range(len(first)), min(count, len(first)))
    return [first[index] for index in sorted(chosen)]

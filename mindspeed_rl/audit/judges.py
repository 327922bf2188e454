"""The audit of judges: how far several of them agree about the same responses, and with people who have marked these."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mindspeed_rl.audit.report import AuditReport, Section
from mindspeed_rl.bounds import is_number
from mindspeed_rl.data.handlers.prompt import as_text
from mindspeed_rl.data.prompts import HUBS, open_rows, split_slice
from mindspeed_rl.data.sources import has_files, read_chunk
from mindspeed_rl.files import describe_missing
from mindspeed_rl.rewards.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha, percent_agreement
from mindspeed_rl.rewards.judge import JudgeClient, JudgeError, JudgeForm, describe_failure
from mindspeed_rl.rewards.judge_addresses import JudgeAddress, list_votes
from mindspeed_rl.rewards.judge_outages import Outage
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import ScorerError, read_score

#: requests of a judge at a time
_AT_ONCE = 16
#: rows in the table of the largest differences, and characters of a response
_SHOWN_ROWS, _SHOWN = 5, 120
#: words of people for right and wrong
_VERDICTS = dict.fromkeys(("right", "correct", "yes", "true", "good", "1", "对", "是", "正确"), True) | dict.fromkeys(
    ("wrong", "incorrect", "no", "false", "bad", "0", "错", "否", "错误"), False
)
#: column of the label, by its usual names
_LABELS = ("label", "labels", "answer")


@dataclass(frozen=True)
class JudgedRow:
    """A response that judges read.

    Attributes:
        where: row of the file.
        sample: the response with its prompt, label and columns.
        human: the mark of a person, or a mark for each criterion of a rubric; None where there is none.
    """

    where: str
    sample: RewardSample
    human: tuple[bool, ...] | None = None


@dataclass
class Panelist:
    """Scores and verdicts of one judge.

    Attributes:
        name: model and server.
        scores: scores of the rows; None where it gave none.
        met: whether the criteria of a rubric are met, of the rows; None where there are none.
        errors: place of a row, and the reason why it has no score.
    """

    name: str
    scores: list[float | None] = field(default_factory=list)
    met: list[tuple[bool, ...] | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def read_judged_rows(path: str, human: str | None) -> list[JudgedRow]:
    """Return the responses of a file: rows with prompt and response, perhaps label, other columns and marks of people.

    Args:
        human: column of the marks; None for none.

    Raises:
        ValueError: a row has no prompt or response, or a mark that is none, or no row has a mark.
    """
    rows = list[JudgedRow]()
    if not path.startswith(HUBS) and not has_files(split_slice(path)[0]):
        raise ValueError(describe_missing(path))
    for chunk in open_rows(path).chunks():
        for number, row in read_chunk(chunk):
            where = f"{chunk.path}, row {number}"
            if isinstance(row, Exception):
                raise ValueError(f"{where}: {row}")
            rows.append(_read_row(row, where, human))
    if not rows:
        raise ValueError(f"{path} has no row")
    if human is not None and all(row.human is None for row in rows):
        raise ValueError(f"--human {human}: no row of {path} has this column; write the name of the column with people's marks")
    return rows


def _read_row(row: object, where: str, human: str | None) -> JudgedRow:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a row is an object with prompt and response, not {type(row).__name__}")
    for name in ("prompt", "response"):
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"{where}: {name} must be a text, not {type(row.get(name)).__name__}; the row has {', '.join(row)}"
            )
    label = next((as_text(row[name]) for name in _LABELS if row.get(name) is not None), None)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "response", *_LABELS)}
    sample = RewardSample(prompt=row["prompt"], response=row["response"], label=label, columns=columns)
    mark = None if human is None else row.get(human)
    return JudgedRow(where, sample, None if mark is None else _read_marks(mark, f"{where}: {human}"))


def _read_marks(value: object, where: str) -> tuple[bool, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{where}: a list of marks has none")
    return tuple(_read_mark(each, where) for each in values)


def _read_mark(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (verdict := _VERDICTS.get(value.strip().casefold())) is not None:
        return verdict
    if is_number(value) and value in (0, 1):
        return bool(value)
    raise ValueError(
        f"{where}: {value!r} is not a mark; true or false, 1 or 0, right or wrong, or null where nobody has marked it"
    )


def has_marked_criteria(rows: Sequence[JudgedRow]) -> bool:
    """Return True where people have marked criteria, not responses."""
    return any(row.human is not None and len(row.human) > 1 for row in rows)


def _check_marks(form: JudgeForm, rows: Sequence[JudgedRow]) -> None:
    """Raise ValueError where people have marked another number of criteria than the rubric of a row has."""
    for row in rows:
        if row.human is None:
            continue
        try:
            criteria = form.write_request(row.sample).criteria
        except JudgeError:  # it has no rubric, which the report shows
            continue
        if criteria is None or len(criteria) != len(row.human):
            there = "the run has no rl_config.judge_rubric" if criteria is None else f"its rubric has {len(criteria)}"
            raise ValueError(f"{row.where}: people have marked {len(row.human)} criteria, but {there}")


def ask_judges(
    judges: Sequence[JudgeAddress],
    settings: RewardSettings,
    rows: Sequence[JudgedRow],
    report: Callable[[str], None] = lambda _: None,
) -> list[Panelist]:
    """Ask every judge about every row, as often as the run would; each of its votes is a panelist.

    Args:
        judges: the judges.
        settings: prompt or rubric, parser and limits of all.

    Raises:
        ValueError: the settings are wrong, or people have marked another number of criteria than the rubric has; no judge has
            been asked.
    """
    form, panel = JudgeForm(settings), list[Panelist]()
    if has_marked_criteria(rows):
        _check_marks(form, rows)
    outages = {judge.name: Outage(judge.name) for judge in judges}
    for vote in list_votes(judges, settings.judge_repeats):
        report(f"{vote.name}: {len(rows):,} responses")
        client = JudgeClient(
            vote.judge,
            form,
            limit_s=settings.judge_timeout_s,
            outage=outages[vote.judge.name],
            temperature=settings.judge_temperature,
            seed=vote.seed,
        )
        panel.append(asyncio.run(_ask(client, form, vote.name, rows)))
    return panel


async def _ask(client: JudgeClient, form: JudgeForm, name: str, rows: Sequence[JudgedRow]) -> Panelist:
    gate, found = asyncio.Semaphore(_AT_ONCE), Panelist(name)

    async def ask(row: JudgedRow) -> tuple[float | None, tuple[bool, ...] | None, str]:
        async with gate:
            try:
                opinion = await client.ask(form.write_request(row.sample))
                score = None if opinion.score is None else read_score(opinion.score)
            except (JudgeError, ScorerError) as error:
                return None, None, f"{row.where}: {error}"
            except Exception as error:  # noqa: BLE001  # a parser of the user may raise anything
                return None, None, f"{row.where}: {describe_failure(error)}"
        if score is None:
            return None, None, f"{row.where}: the parser of the reply has no opinion"
        return score[0], opinion.verdicts, ""

    for total, met, error in await asyncio.gather(*map(ask, rows)):
        found.scores.append(total)
        found.met.append(met)
        if error:
            found.errors.append(error)
    return found


Verdicts = list[bool | None]


@dataclass(frozen=True)
class JudgeAudit:
    """Scores of judges, and how far they agree.

    Attributes:
        rows: the responses.
        panel: scores and verdicts of each judge.
        threshold: score from which a judge finds a response right.
    """

    rows: Sequence[JudgedRow]
    panel: Sequence[Panelist]
    threshold: float = 0.5

    def _list_verdicts(self, one: Panelist, by_criterion: bool) -> Verdicts:
        if by_criterion:
            return list(self._list_criteria(one.met))
        return [None if score is None else score >= self.threshold for score in one.scores]

    def _list_criteria(self, rated: Sequence[tuple[bool, ...] | None]) -> Iterator[bool | None]:
        """Yield the verdicts about the criteria of all rows; None for a row that is not rated."""
        for index, verdicts in enumerate(rated):
            known = [one.met[index] for one in self.panel]
            count = next((len(met) for met in known if met is not None), 0)
            yield from verdicts if verdicts is not None and len(verdicts) == count else [None] * count

    @property
    def has_criteria(self) -> bool:
        """True where the judges judge the criteria of a rubric."""
        return any(met is not None for one in self.panel for met in one.met)

    @property
    def people_mark_criteria(self) -> bool:
        """True where people have marked criteria, not responses."""
        return has_marked_criteria(self.rows)

    @property
    def table(self) -> list[tuple[bool | None, ...]]:
        """Verdicts of the judges: a row per response, or per criterion."""
        return list(zip(*(self._list_verdicts(one, self.has_criteria) for one in self.panel)))

    @property
    def alpha(self) -> float | None:
        """Krippendorff's alpha of the verdicts."""
        return krippendorff_alpha([[None if each is None else float(each) for each in row] for row in self.table])

    def compare_with_people(self) -> list[tuple[str, int, float | None, float | None]]:
        """Return for each judge, and for their mean, the units that people have marked, percent agreement and Cohen's kappa."""
        if all(row.human is None for row in self.rows):
            return []
        by_criterion = self.people_mark_criteria
        marks: Verdicts = [None if row.human is None else row.human[0] for row in self.rows]
        if by_criterion:
            marks = list(self._list_criteria([row.human for row in self.rows]))
        raters = [(one.name, self._list_verdicts(one, by_criterion)) for one in self.panel]
        if len(self.panel) > 1:
            raters.append(("all judges", [_vote(verdicts) for verdicts in zip(*(verdicts for _, verdicts in raters))]))
        counts = [sum(a is not None and b is not None for a, b in zip(verdicts, marks)) for _, verdicts in raters]
        return [
            (name, count, percent_agreement(verdicts, marks), cohen_kappa(verdicts, marks))
            for (name, verdicts), count in zip(raters, counts)
        ]

    def compare_pairs(self) -> list[tuple[str, str, float | None, float | None]]:
        """Return for each pair of judges percent agreement and Cohen's kappa."""
        verdicts = {one.name: self._list_verdicts(one, self.has_criteria) for one in self.panel}
        return [
            (one, other, percent_agreement(verdicts[one], verdicts[other]), cohen_kappa(verdicts[one], verdicts[other]))
            for one, other in combinations(verdicts, 2)
        ]

    @property
    def failed_share(self) -> float:
        """Share of the replies that have no score."""
        return sum(len(one.errors) for one in self.panel) / (len(self.panel) * len(self.rows))

    def list_figures(self) -> list[float | None]:
        """Return what is compared with the bound: alpha of the judges, and the kappa of each with people."""
        among = [self.alpha] if len(self.panel) > 1 else []
        return among + [kappa for _, _, _, kappa in self.compare_with_people()]

    def passes(self, bound: float) -> bool:
        """Return True where judges agree with each other, and each with people, at least as much as the bound."""
        return self.failed_share <= 1 - bound and all(figure is not None and figure >= bound for figure in self.list_figures())

    def describe(self, bound: float) -> AuditReport:
        """Return the audit as a report.

        Args:
            bound: smallest alpha and kappa.
        """
        people = self.compare_with_people()
        unit = "criteria" if self.has_criteria else "responses"
        judges = [
            (
                one.name,
                f"{len(self.rows) - len(one.errors)} of {len(self.rows)}",
                _mean(one.scores),
                one.errors[0] if one.errors else "",
            )
            for one in self.panel
        ]
        scores = krippendorff_alpha(list(zip(*(one.scores for one in self.panel))), "interval")
        among = [
            ("percent agreement", _mean([percent for _, _, percent, _ in self.compare_pairs()])),
            ("Fleiss' kappa", _format(fleiss_kappa(self.table))),
            ("Krippendorff's alpha", _format(self.alpha)),
            ("Krippendorff's alpha of the scores", _format(scores)),
        ]
        known = [figure for figure in self.list_figures() if figure is not None]
        verdict = f"the smallest alpha or kappa is {min(known, default=0.0):.2f} (bound {bound:g})"
        if len(known) < len(self.list_figures()):
            verdict = f"all verdicts about these {unit} are alike; agreement shows where some are right and some are wrong"
        if self.failed_share == 1:
            verdict = f"nothing is scored: {self.panel[0].errors[0]}"
        if self.failed_share:
            verdict += f"; {self.failed_share:.1%} of the replies have no score"
        return AuditReport(
            f"audit of the judges: {', '.join(one.name for one in self.panel)}",
            verdict,
            self.passes(bound),
            [
                Section("Judges", ("judge", "scored", "mean score", "first failure"), judges),
                Section(
                    f"Agreement of two, over {unit}",
                    ("judge", "judge", "percent", "Cohen's kappa"),
                    [(one, other, _format(percent), _format(kappa)) for one, other, percent, kappa in self.compare_pairs()],
                ),
                Section(f"Agreement of all, over {unit}", ("", ""), among if len(self.panel) > 1 else []),
                Section(
                    "Agreement with people",
                    ("judge", "criteria" if self.people_mark_criteria else "responses", "percent", "Cohen's kappa"),
                    [(name, str(count), _format(percent), _format(kappa)) for name, count, percent, kappa in people],
                ),
                Section("Largest differences", ("response", "scores", "marked"), self._list_differences()),
            ],
        )

    def _list_differences(self) -> list[tuple[str, str, str]]:
        """Return the responses about which judges, or a judge and people, differ most."""
        differences = []
        for index, row in enumerate(self.rows):
            scores = [one.scores[index] for one in self.panel]
            mark = None if row.human is None or len(row.human) > 1 else float(row.human[0])
            values = [value for value in (*scores, mark) if value is not None]
            if values and max(values) > min(values):
                shown = " ".join("-" if score is None else f"{score:.2f}" for score in scores)
                marked = {None: "", 1.0: "right", 0.0: "wrong"}[mark]
                text = row.sample.response
                text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} [...]"
                differences.append((max(values) - min(values), (f"{row.where}: {text!r}", shown, marked)))
        return [line for _, line in sorted(differences, key=lambda item: -item[0])[:_SHOWN_ROWS]]

    def encode(self, bound: float) -> dict[str, object]:
        """Return the audit as plain values."""
        return {
            "judges": [
                {"name": one.name, "scores": one.scores, "failures": one.errors[:_SHOWN_ROWS], "failed": len(one.errors)}
                for one in self.panel
            ],
            "rows": len(self.rows),
            "units": "criteria" if self.has_criteria else "responses",
            "pairs": [
                {"judges": [one, other], "percent": percent, "kappa": kappa}
                for one, other, percent, kappa in self.compare_pairs()
            ],
            "fleiss_kappa": fleiss_kappa(self.table),
            "krippendorff_alpha": self.alpha,
            "people": [
                {"judge": name, "units": count, "percent": percent, "kappa": kappa}
                for name, count, percent, kappa in self.compare_with_people()
            ],
            "bound": bound,
            "passes": self.passes(bound),
        }


def _vote(verdicts: Sequence[bool | None]) -> bool | None:
    """Return the verdict of the majority; None for a draw and where there is none."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return None if not known or 2 * sum(known) == len(known) else 2 * sum(known) > len(known)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _format(statistics.fmean(known) if known else None)


def _format(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"

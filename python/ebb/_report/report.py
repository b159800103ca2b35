"""Reports: what happened to each storage of a forward and its backward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ebb import _C
from ebb._policy.variable import JobPolicy
from ebb._report.advice import Advice, Replays
from ebb._report.planned import ReportedPlan, plan_of_step
from ebb._report.rows import FATES, HELD, Row, collapsed
from ebb._report.text import COLUMNS, advice_lines, cells, duration, notes, plan_lines, size, table
from ebb._support.private_files import write_private
from ebb._support.shown import shown

_FORMAT = 2  # version of the files in JSON
_MOST_RULES, _MOST_ADVICE, _MOST_FRAMES = 5, 5, 8  # limits for the output
_IDLE = "rules without effect here (the operator did not run, or an earlier rule decided)"
_OUTCOMES = {
    "in_vain": "unused",
    "held": "not freed",
    "stopped": "replayed in part",
}  # of replays ahead


@dataclass(frozen=True)
class Report:
    """A memory breakdown of one forward in regions and its backward. See ``ebb.report``.

    Attributes:
        number: of the forward and backward, from 1; ``passes`` of ``ebb.stats`` counts them. A
            training step that accumulates gradients has several.
        rows: one ``Row`` for all storages that are alike; a storage's bytes count in one row.
        ahead: the regions for which replays ran ahead, counted by outcome: ``in_time``, ``late``,
            ``in_vain``, ``held`` and ``stopped``; see ``"ahead"`` of ``ebb.stats``.
        idle_rules: rules that had no effect, in words; without those of presets.
        peak_held: the most bytes saved for backward at a time.
        peak_eager: the most bytes that eager would have saved for backward.
        values: for each storage of the rows a tuple: index in ``rows``, bytes, and True if autograd
            packed it.
        replays: tuples: indices in ``values`` of the inputs, indices of the recomputed outputs, and
            the seconds for which backward waited.
        timeline: tuples: seconds since the forward began, bytes saved for backward, and bytes that
            eager would save.
        spans: regions, their backwards, replays and transfers, as tuples: kind, name, start and
            duration in seconds, thread, bytes.
        plan: the ``ebb.Plan``, or the plan of ``EBB_BUDGET``, under which the step ran, as
            reports show it; None without a plan.
        policy: the policy of the variable ``EBB``; None if the variable gives none.
    """

    FATES = FATES

    number: int
    rows: tuple[Row, ...]
    ahead: dict[str, int]
    idle_rules: tuple[str, ...]
    peak_held: int
    peak_eager: int
    timeline: tuple[tuple[float, int, int], ...] = field(repr=False)
    values: tuple[tuple[int, int, bool], ...] = field(repr=False)
    replays: tuple[tuple[list[int], list[int], float], ...] = field(repr=False)
    spans: tuple[tuple[str, str, float, float, int, int], ...] = field(repr=False)
    plan: ReportedPlan | None = field(default=None, repr=False, compare=False)
    policy: JobPolicy | None = field(default=None, repr=False, compare=False)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by fate."""
        return {
            fate: sum(row.bytes for row in self.rows if row.fate == fate)
            for fate in FATES
            if fate != "unneeded"
        }

    @property
    def held(self) -> int:
        """Bytes that were allocated in the regions and are on the device when they end."""
        return sum(self.totals[fate] for fate in HELD)

    @property
    def eager(self) -> int:
        """Bytes that eager would save for backward: the sum over rows."""
        return sum(row.eager for row in self.rows)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Rules that would each save time, the best first. Empty under a plan: ``plan.points``
        shows the effect of other budgets."""
        if self.plan:
            return ()
        return Replays(self.rows, self.values, self.replays, self.policy).advice()

    @property
    def notes(self) -> tuple[str, ...]:
        """Advice that is no rule, in words."""
        return notes(self.rows)

    def collapsed(self) -> tuple[Row, ...]:
        """Join rows of modules whose names differ only by numbers.

        ``layers.0.mlp`` to ``layers.31.mlp`` become ``layers.0-31.mlp``, with ``layers=32``.
        """
        return collapsed(self.rows)

    @cached_property
    def _stacks(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(row.stack for row in self.rows))

    def _with_places(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """The rows for JSON, with the index of the stack in place of the stack."""
        places = {stack: place for place, stack in enumerate(self._stacks)}
        return [asdict(replace(row, stack=())) | {"stack": places[row.stack]} for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary for JSON, with everything that ``load`` needs."""
        return {
            "format": _FORMAT,
            **{known.name: getattr(self, known.name) for known in fields(self)},
            "held": self.held,
            "eager": self.eager,
            "totals": self.totals,
            "rows": self._with_places(self.rows),
            "stacks": self._stacks,
            "advice": [asdict(one) | {"rule": one.rule} for one in self.advice],
            "notes": self.notes,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "policy": None if self.policy is None else asdict(self.policy),
        }

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that ``save`` wrote as JSON.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no report, or one of another format.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**_fields_of(document))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(
                f"ebb: {shown(str(path))} is not a report that ebb saved as JSON: {why}"
            ) from error

    def text(self, rows: int = 30) -> str:
        """Return the report as a table, largest rows first.

        Args:
            rows: the most rows to show.
        """
        return _text(self, rows)

    __str__ = text

    def save(self, path: str | Path) -> None:
        """Write the report to a file.

        Args:
            path: its suffix gives the format: ``.txt``, ``.json`` or ``.html`` (one page that needs
                no network).

        Raises:
            ValueError: the suffix is none of these.
            OSError: the file cannot be written.
        """
        path = Path(path)
        check_path(path)
        write_private(path, self._in_format(path.suffix))

    def _in_format(self, suffix: str) -> str:
        """The content of a file with this suffix."""
        if suffix == ".html":
            return self._page()
        if suffix == ".json":
            lines = (f" {json.dumps(key)}: {json.dumps(v)}" for key, v in self.to_dict().items())
            return "{\n" + ",\n".join(lines) + "\n}\n"
        return self.text() + "\n"

    def _page(self) -> str:
        data = self.to_dict()
        del data["values"], data["replays"]
        data["collapsed"] = self._with_places(self.collapsed())
        data["spans"] = [span for span in self.spans if span[0] in ("region", "backward")]
        data["fates"] = FATES
        folder = Path(__file__).parent
        page = (folder / "report.html").read_text(encoding="utf-8")
        script = (folder / "report.js").read_text(encoding="utf-8")
        before, after = page.replace("{script}", script, 1).split("{data}")
        return before + json.dumps(data).replace("<", "\\u003c") + after


def _fields_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the report whose ``to_dict()`` returned `document`."""
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("it has no format version")
    if (version := document["format"]) != _FORMAT:
        raise ValueError(
            f"its format version is {shown(version)}, expected {_FORMAT}; use the release of ebb "
            "that wrote it"
        )
    stacks = [tuple(map(_string, stack)) for stack in document["stacks"]]
    plan, policy = document["plan"], document["policy"]
    _check_numbers(plan)
    lists = ("timeline", "values", "replays", "spans")
    return {
        **{key: int(document[key]) for key in ("number", "peak_held", "peak_eager")},
        "rows": tuple(_row(row, stacks) for row in document["rows"]),
        "ahead": {_string(name): int(count) for name, count in document["ahead"].items()},
        "idle_rules": tuple(map(_string, document["idle_rules"])),
        **{key: tuple(map(tuple, document[key])) for key in lists},
        "plan": None if plan is None else ReportedPlan.from_dict(plan),
        "policy": None if policy is None else JobPolicy(**policy),
    }


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {shown(value)}")
    return value


_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str}


def _row(given: Mapping[str, Any], stacks: list[tuple[str, ...]]) -> Row:
    row = Row(**{**given, "shape": tuple(given["shape"]), "stack": stacks[given["stack"]]})
    if row.fate not in FATES:
        raise ValueError(f"unknown fate {shown(row.fate)}")
    for known in fields(Row):
        if not isinstance(value := getattr(row, known.name), _KINDS.get(str(known.type), tuple)):
            raise TypeError(f"{known.name} of a row is {shown(value)}")
    return row


def _check_numbers(value: object, key: str = "") -> None:
    """Checks that all of a plan but names are numbers."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner, key)
    elif isinstance(value, str) and key not in ("modules", "regions", "spans"):
        raise TypeError(f"{key} of a plan is {shown(value)}")


def headline(report: Report) -> str:
    """A line with the peak of the step: of all that it allocates under a plan, else of the bytes
    saved for backward."""
    step, plan = f"forward and backward {report.number}", report.plan
    if plan is None:
        return f"{step}: {_saving(report)}"
    measured = plan.measured and plan.measured.peak
    kind, peak = ("measured", measured) if measured else ("predicted", plan.predicted.peak or 0)
    times = _times(plan.plain.peak or 0, peak)
    return f"{step}, under a plan: {kind} peak {size(peak)}; {times}"


def _saving(report: Report) -> str:
    times = _times(report.peak_eager, report.peak_held)
    return f"peak saved for backward {size(report.peak_held)}; {times}"


def _times(eager: int, peak: int) -> str:
    times = f" ({eager / peak:.1f} times as much)" if peak > 0 else ""
    return f"{size(eager)} in eager{times}"


def _text(report: Report, most: int) -> str:
    rows = sorted(report.collapsed(), key=lambda row: (-row.bytes, -row.replay_seconds))
    lines = ["ebb, " + headline(report), ""]
    if report.plan is not None:
        lines += [*plan_lines(report.plan), ""]
        lines += [f"forward and backward {report.number}: {_saving(report)}", ""]
    header = ["fate", "storages", "bytes", "in eager", "replays", "replay time", ""]
    lines += table(header, _totals(report))
    if any(report.ahead.values()):
        lines += ["", _ahead(report)]
    lines += ["", *report.notes] if report.notes else []
    if report.advice:
        lines += [
            "",
            "each of these rules, added as the first rule, would save about this much time in each "
            "forward and backward:",
        ]
        lines += [line for one in report.advice[:_MOST_ADVICE] for line in advice_lines(one)]
    lines += ["", "storages, largest first:"]
    lines += table(COLUMNS, [cells(row) for row in rows[:most]])
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more; report.text(rows=...) shows them")
    if rows and rows[0].stack:
        lines += ["", "the Python stack of the largest, innermost first:"]
        lines += [f"  {frame}" for frame in rows[0].stack[:_MOST_FRAMES]]
    if report.idle_rules:
        more = len(report.idle_rules) - _MOST_RULES
        rules = "; ".join(report.idle_rules[:_MOST_RULES])
        lines += ["", f"{_IDLE}: {rules}" + (f"; and {more} more" if more > 0 else "")]
    return "\n".join(lines)


def _ahead(report: Report) -> str:
    regions = ", ".join(
        f"{count} {_OUTCOMES.get(fate, fate.replace('_', ' '))}"
        for fate, count in report.ahead.items()
        if count
    )
    ahead = sum(row.ahead_seconds for row in report.rows)
    replays = sum(row.replay_seconds for row in report.rows)
    return (
        f"replayed ahead of backward: {duration(ahead) or '0 ms'} of "
        f"{duration(replays) or '0 ms'}; regions: {regions}"
    )


def _totals(report: Report) -> list[list[str]]:
    found = []
    for fate, meaning in report.FATES.items():
        rows = [row for row in report.rows if row.fate == fate]
        if rows:
            replays = sum(row.replays for row in rows)
            found.append(
                [
                    fate,
                    str(sum(row.count for row in rows)),
                    size(sum(row.bytes for row in rows)),
                    size(sum(row.eager for row in rows)),
                    str(replays) if replays else "",
                    duration(sum(row.replay_seconds for row in rows)),
                    meaning,
                ]
            )
    return [*found, ["", "", "", size(report.eager), "", "", "total that eager saves for backward"]]


def check_path(path: Path) -> None:
    if path.suffix not in (".txt", ".json", ".html"):
        raise ValueError(
            f"ebb: a report's file name must end in .txt, .json or .html; got {shown(str(path))}"
        )


def reports() -> Iterator[Report]:
    """The recorded forwards and backwards, oldest first."""
    for found in _C.reports():
        rows = tuple(Row(**row | {"stack": _of_program(row["stack"])}) for row in found.pop("rows"))
        found = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        plan = plan_of_step(found["number"], (row.region for row in rows))
        yield Report(rows=rows, plan=plan, policy=JobPolicy.of_variables(), **found)


_NOT_OF_PROGRAM = (f"{torch.__path__[0]}/", f"{Path(__file__).parents[1]}/", "<frozen ")


def _of_program(stack: Iterable[str]) -> tuple[str, ...]:
    return tuple(frame for frame in stack if not frame.startswith(_NOT_OF_PROGRAM))


def latest(all_steps: Iterable[Report]) -> Report | None:
    """The last report of a pass that saved something for backward."""
    recorded = [one for one in all_steps if one.rows]
    saving = [one for one in recorded if one.peak_eager > 0]
    return next(reversed(saving or recorded), None)


def report() -> Report:
    """Return the report of the last recorded forward and backward that saved something: each
    storage's operator and its fate. Under ``EBB_DISABLE=1`` the report is empty.

    It begins when an outermost region is entered after a backward. A storage's bytes count in
    one row, so the rows sum to the totals. ``Report.held`` is the memory of the regions' results
    that is still on the device when the regions end.

    Raises:
        RuntimeError: none has been recorded.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> with ebb.record_reports(), ebb.region(ebb.policies.save_matmuls):
        ...     loss = net(torch.ones(2, 8)).sum()
        >>> loss.backward()
        >>> ebb.report().totals["recomputed"]
        64
    """
    found = latest(reports())
    if found is None and _C.are_disabled_everywhere():
        nothing: dict[str, Any] = dict.fromkeys(("timeline", "values", "replays", "spans"), ())
        return Report(0, (), ahead={}, idle_rules=(), peak_held=0, peak_eager=0, **nothing)
    if found is None:
        raise RuntimeError(
            "ebb: no forward has been recorded. Run one under `with ebb.record_reports():`, or set "
            "the environment variable EBB_REPORT to the path of a file before the program starts"
        )
    return found

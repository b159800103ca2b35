"""Reports as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from ebb._report.advice import Advice
from ebb._report.planned import Course, ReportedPlan
from ebb._report.rows import Row
from ebb._report.step import Step

_MOST_RULES, _MOST_ADVICE, _MOST_FRAMES = 5, 5, 8  # limits for the output
_IDLE = "rules without effect in this step (misspelt, or decided by earlier rules)"
_OUTCOMES = {
    "in_vain": "unused",
    "held": "not freed",
    "stopped": "replayed in part",
}  # of replays ahead
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """A size as text, such as ``"1.5 MiB"``."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{nbytes:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time as text, such as ``"1.50 ms"``; empty for 0."""
    if seconds == 0:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def headline(report: Step) -> str:
    saving = ""
    if report.peak_held > 0:
        saving = f" ({report.peak_eager / report.peak_held:.1f} times as much)"
    return (
        f"step {report.step}: peak saved for backward {size(report.peak_held)}; "
        f"{size(report.peak_eager)} in eager{saving}"
    )


def text(report: Step, most: int) -> str:
    rows = sorted(report.collapsed(), key=lambda row: (-row.bytes, -row.replay_seconds))
    lines = ["ebb, " + headline(report), ""]
    header = ["fate", "storages", "bytes", "in eager", "replays", "replay time", ""]
    lines += _table(header, _totals(report))
    if any(report.ahead.values()):
        lines += ["", _ahead(report)]
    if report.plan is not None:
        lines += ["", *_plan(report.plan)]
    if report.advice:
        lines += [
            "",
            "each of these rules, added as the first rule, would save about this much time:",
        ]
        lines += [f"  {_advice(one)}" for one in report.advice[:_MOST_ADVICE]]
    lines += ["", "storages, largest first:"]
    where = "module or region"
    header = [
        "bytes",
        "count",
        "fate",
        "operator",
        "shape",
        where,
        "line",
        "replay",
        "rule or reason",
    ]
    lines += _table(header, [_cells(row) for row in rows[:most]])
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more; report.text(rows=...) shows them")
    if rows and rows[0].stack:
        lines += ["", "the Python stack of the largest, innermost first:"]
        lines += [f"  {frame}" for frame in rows[0].stack[:_MOST_FRAMES]]
    if report.idle_rules:
        shown = "; ".join(report.idle_rules[:_MOST_RULES])
        more = len(report.idle_rules) - _MOST_RULES
        lines += ["", f"{_IDLE}: {shown}" + (f"; and {more} more" if more > 0 else "")]
    return "\n".join(lines)


def _advice(one: Advice) -> str:
    cost = f"for {size(one.bytes)}" if one.bytes >= 0 else f"and {size(-one.bytes)}"
    op = one.op.removeprefix("aten::").removesuffix(".default")
    layers = f", {one.layers} layers" if one.layers > 1 else ""
    return f"{duration(one.seconds)} a step {cost}: save {op} in {one.where}{layers}: {one.rule}"


def _ahead(report: Step) -> str:
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


def _plan(plan: ReportedPlan) -> list[str]:
    budget = f"{size(abs(plan.budget))} {'below' if plan.budget < 0 else 'above'}"
    lines = [f"plan for a budget of {budget} the memory in use when the step begins:"]
    lines.append(f"  predicted: {_course(plan.predicted)}")
    if plan.measured is None:
        lines.append("  measured:  not measured")
    else:
        more = plan.deviation
        lines.append(f"  measured:  {_course(plan.measured, more['peak'], more['duration'])}")
    lines.append(f"  eager:     {_course(plan.plain)}")
    return lines


def _course(course: Course, more_bytes: float | None = None, more_time: float | None = None) -> str:
    parts = []
    if course.peak is not None:
        parts.append(f"peak {size(course.peak)}{_deviation(more_bytes)}")
    if course.duration is not None:
        parts.append(f"{course.duration:.2f} ms{_deviation(more_time)}")
    return ", ".join(parts)


def _deviation(share: float | None) -> str:
    return "" if share is None else f" ({share:+.1%})"


def _totals(report: Step) -> list[list[str]]:
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


def _cells(row: Row) -> list[str]:
    where = row.where + (f" x{row.layers}" if row.layers > 1 else "")
    shape = "x".join(str(n) for n in row.shape) or "scalar"
    why = row.reason if row.fate in ("kept", "copied") or not row.rule else row.rule
    return [
        size(row.bytes),
        str(row.count),
        row.fate,
        row.op.removeprefix("aten::").removesuffix(".default"),
        f"{shape} {row.dtype}",
        where,
        PurePath(row.source).name,
        duration(row.replay_seconds),
        why,
    ]


def _table(header: list[str], rows: Sequence[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    right = {"bytes", "in eager", "count", "storages", "replays", "replay time", "replay"}
    lines = []
    for line in [header, *rows]:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(line, widths, header, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines

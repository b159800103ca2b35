"""Parts of reports as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from ebb._report.advice import Advice
from ebb._report.planned import Course, ReportedPlan
from ebb._report.rows import Row

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


def price(ratio: float) -> str:
    """A predicted time over eager's as text, such as ``"about 20% more time"``."""
    if ratio > 2:
        return f"about {ratio:.1f} times eager's time"
    return f"about {ratio - 1:.0%} more time"


_MOST_LINES = 8  # of a file in a text


def advice_lines(one: Advice) -> list[str]:
    """A rule, its effect, and how to add it by variables."""
    cost = f"for {size(one.bytes)}" if one.bytes >= 0 else f"and {size(-one.bytes)}"
    op = one.op.removeprefix("aten::").removesuffix(".default")
    layers = f", {one.layers} layers" if one.layers > 1 else ""
    lines = [f"  {duration(one.seconds)} {cost}: save {op} in {one.where}{layers}: {one.rule}"]
    file = one.file.splitlines()
    if not one.file:
        lines += [f"    by variable: {one.variable}"] if one.variable else []
    elif len(file) <= _MOST_LINES:
        lines += [f"    by variable: {one.variable}, with this policy.toml:"]
        lines += [f"        {line}" for line in file]
    else:
        lines += [f"    by variable: {one.variable}; the report as .html or .json has the file"]
    return lines


def plan_lines(plan: ReportedPlan) -> list[str]:
    budget = f"{size(abs(plan.budget))} {'below' if plan.budget < 0 else 'above'}"
    source = f" (from {plan.source})" if plan.source else ""
    lines = [f"plan for a budget of {budget} the memory in use when the step begins{source}:"]
    if plan.passes > 1:
        lines.append(
            f"  a step has {plan.passes} forwards and backwards; apart from these lines, the "
            "report describes the last of them"
        )
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


_AUTOCAST = "weight cast by autocast"  # how kWeightCast in src/plugins/report/reporter.cpp begins


def notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Advice that is no rule: what else the program could change, in words."""
    nbytes = sum(row.bytes for row in rows if row.reason.startswith(_AUTOCAST))
    if nbytes == 0:
        return ()
    return (
        f"{size(nbytes)} are weights cast by autocast, which its cache keeps until autocast ends. "
        "If the program calls torch.set_autocast_cache_enabled(False) before it trains, ebb frees "
        "them and backward casts the weights again",
    )


COLUMNS = [
    "bytes", "count", "fate", "operator", "shape", "module or region", "line", "replay",
    "rule or reason",
]  # fmt: skip


def cells(row: Row) -> list[str]:
    """The row in the columns `COLUMNS`."""
    where = row.where + (f" x{row.layers}" if row.layers > 1 else "")
    shape = "x".join("*" if n < 0 else str(n) for n in row.shape) or "scalar"
    is_against = row.fate in ("kept", "copied", "escaped")  # else the rule says why
    why = (row.reason if is_against or not row.rule else "") or row.rule
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


def table(header: list[str], rows: Sequence[list[str]]) -> list[str]:
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

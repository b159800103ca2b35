"""Summaries of a plan: what each kind of region saves and recomputes."""

from __future__ import annotations

from collections import Counter

from ebb._plan.choice import PLAIN
from ebb._plan.choose import Chooser, Chosen
from ebb._plan.pages import has_rows
from ebb._plan.profile import Value
from ebb._report.planned import Cut
from ebb._support.names import in_ranges

_INPUTS = "what it reads"


def cuts_of(chooser: Chooser, chosen: Chosen) -> tuple[Cut, ...]:
    """One cut for each group of regions that ran the same and got the same choice, in order."""
    groups: dict[tuple[int, object], list[str]] = {}
    for region, point in chosen.items():
        groups.setdefault((chooser.alike[region], point.choice), []).append(region)
    return tuple(_cut(regions, chooser, chosen) for regions in groups.values())


def _cut(regions: list[str], chooser: Chooser, chosen: Chosen) -> Cut:
    name, point = ", ".join(in_ranges(regions)), chosen[regions[0]]
    choice = point.choice
    if choice is PLAIN:
        return Cut(name, len(regions), False, point.held, point.added, {}, {}, {}, {}, {})
    simulator, call = chooser.simulator, chooser.calls[regions[0]][0]
    step = simulator.step
    kept: Counter[str] = Counter()
    away: Counter[str] = Counter()
    paged: Counter[str] = Counter()
    given_up: Counter[str] = Counter()
    often: Counter[str] = Counter()
    times: dict[str, float] = {}
    replayed = simulator.replayed(call, choice)
    for place, number in enumerate(step.calls[call].operators):
        operator = step.operators[number]
        op = operator.func_name.removeprefix("aten::").removesuffix(".default")
        if place in choice.kept:
            kind = away if place in choice.offloaded else kept
            for value in map(step.values.__getitem__, operator.outputs):
                if place in choice.paged and has_rows(value):
                    paged[op] += _live(value)
                else:
                    kind[op] += value.memory
        elif number in replayed:
            saved = [value for value in operator.outputs if step.values[value].saved]
            given_up[op] += sum(step.values[value].memory for value in saved)
            times[op] = times.get(op, 0.0) + replayed[number] * simulator.replay_time(number)
            often[op] += replayed[number] if place in choice.each_time else 0
    inputs = [
        step.values[value] for value in step.inputs_of(step.calls[call]) if step.may_leave(value)
    ]
    if choice.inputs:
        away[_INPUTS] = sum(value.memory for value in inputs)
    if choice.paged_inputs:
        paged[_INPUTS] = sum(_live(value) for value in inputs if has_rows(value))
    longest = sorted(times, key=lambda op: -times[op])
    return Cut(
        name,
        len(regions),
        True,
        point.held,
        point.added,
        dict(kept.most_common()),
        {op: (given_up[op], times[op]) for op in longest},
        dict(away.most_common()),
        dict(paged.most_common()),
        {op: count for op, count in often.most_common() if count > 0},
    )


def _live(value: Value) -> int:
    """Bytes of the valid rows."""
    return value.live_rows * (value.memory // value.rows)

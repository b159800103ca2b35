"""Where a plan cuts: what each kind of region keeps, and what it makes again."""

from __future__ import annotations

from collections import Counter

from ebb._plan.choose import Chooser, Chosen
from ebb._report.planned import Cut
from ebb._support.names import in_ranges


def cuts_of(chooser: Chooser, chosen: Chosen) -> tuple[Cut, ...]:
    """One for regions that did the same and are to do the same, in the order of the step."""
    groups: dict[tuple[int, object], list[str]] = {}
    for region, point in chosen.items():
        groups.setdefault((chooser.alike[region], point.saved), []).append(region)
    return tuple(_cut(regions, chooser, chosen) for regions in groups.values())


def _cut(regions: list[str], chooser: Chooser, chosen: Chosen) -> Cut:
    name, point = ", ".join(in_ranges(regions)), chosen[regions[0]]
    if point.saved is None:
        return Cut(name, len(regions), False, point.held, point.added, {}, {})
    simulator, call = chooser.simulator, chooser.calls[regions[0]][0]
    step = simulator.step
    kept: Counter[str] = Counter()
    given_up: Counter[str] = Counter()
    times: dict[str, float] = {}
    replayed = simulator.replayed(call, point.saved)
    for place, number in enumerate(step.calls[call].operators):
        operator = step.operators[number]
        op = operator.func_name.removeprefix("aten::").removesuffix(".default")
        if place in point.saved:
            kept[op] += sum(step.values[value].memory for value in operator.outputs)
        elif number in replayed:
            saved = [value for value in operator.outputs if step.values[value].saved]
            given_up[op] += sum(step.values[value].memory for value in saved)
            times[op] = times.get(op, 0.0) + simulator.replay_time(number)
    longest = sorted(times, key=lambda op: -times[op])
    again = {op: (given_up[op], times[op]) for op in longest}
    held, added = point.held, point.added
    return Cut(name, len(regions), True, held, added, dict(kept.most_common()), again)

"""Describes plans in words. In: a plan and its choices. Out: text, a `Cut` for each region kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from ebb._plan.choice import EAGER
from ebb._plan.choose import OUTSIDE, Chooser, Chosen
from ebb._plan.pages import has_rows
from ebb._plan.process_settings import ProcessSettings
from ebb._plan.profile import Value
from ebb._policy.policy import Policy
from ebb._report.planned import Cut
from ebb._report.text import size
from ebb._support.names import in_ranges

_INPUTS = "what it reads"
_EQUAL, _UNKNOWN = 0.01, 0.3  # spread of times: exact below the first, unknown above the second


class Plan(Protocol):
    """The part of an ``ebb.Plan`` that is described."""

    policies: dict[str, Policy]
    settings: ProcessSettings
    budget: int
    peak: int
    duration: float
    plain_peak: int
    plain_duration: float
    spread: float


def summary(plan: Plan) -> str:
    """Describe a plan in one line."""
    if not plan.policies:
        return (
            f"ebb: the step fits as it is ({size(plan.plain_peak)} of {size(plan.budget)}): "
            "nothing is recomputed, and no module is a region"
        )
    share = plan.peak / max(1, plan.plain_peak)
    regions = ", ".join(in_ranges(name or "the model" for name in plan.policies))
    many = "region" if len(plan.policies) == 1 else "regions"
    ahead = "" if plan.settings.ahead else ", without replays ahead of backward"
    return (
        f"ebb: {len(plan.policies)} {many} ({regions}); predicted peak {size(plan.peak)} "
        f"({share:.0%} of eager's {size(plan.plain_peak)}), {_more_time(plan)}{ahead}"
    )


def _more_time(plan: Plan) -> str:
    """Additional time, as precise as the measured times, which differed by ``plan.spread``."""
    ratio = plan.duration / plan.plain_duration
    if plan.spread < _EQUAL:
        return f"{ratio - 1:.1%} more time"
    if plan.spread > _UNKNOWN:
        return "more time by an unknown amount (the times of profiled steps vary too much)"
    least = max(0.0, ratio / (1 + plan.spread) - 1)
    return f"{least:.0%} to {ratio * (1 + plan.spread) - 1:.0%} more time"


def explained(plan: Plan, chooser: Chooser, chosen: Chosen) -> str:
    """One paragraph for each kind of region."""
    lines = [summary(plan).removeprefix("ebb: "), ""]
    for cut in cuts_of(chooser, chosen):
        lines += _paragraph(cut)
    return "\n".join(lines)


def _paragraph(cut: Cut) -> list[str]:
    if not cut.is_region:
        return [f"{cut.modules}: left eager; each saves {size(cut.held)}"]
    lines = [f"{cut.modules}: each saves {size(cut.held)} and takes {cut.added:.2f} ms more"]
    if cut.kept:
        lines.append("  saved: " + _sizes(cut.kept))
    if cut.away:
        lines.append("  offloaded: " + _sizes(cut.away))
    if cut.paged:
        lines.append("  paged: " + _sizes(cut.paged))
    if cut.again:
        lines.append(
            "  recomputed: "
            + ", ".join(
                f"{op} ({size(nbytes)} freed, {time:.2f} ms)"
                for op, (nbytes, time) in cut.again.items()
            )
        )
    if cut.often:
        parts = [f"{op} ({count} times)" for op, count in cut.often.items() if count > 1]
        lines.append("  of these, recomputed several times: " + ", ".join(parts))
    return lines


def _sizes(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{op} ({size(nbytes)})" for op, nbytes in operators.items())


def least_explained(
    budget: int | float,
    base: int,
    plain_peak: int,
    peak: int,
    minimum: int,
    chooser: Chooser,
    chosen: Chosen,
) -> str:
    """Explain why a budget is too small."""
    if isinstance(budget, float):
        share = min(1.0, peak / max(1, plain_peak) + 0.0051)
        given, least = f"{budget:.1%}", f"{share:.0%}, or {size(minimum)} in total"
    else:
        given, least = size(budget), size(minimum)
    uses = chooser.users_of_peak(chosen)
    parts = ", ".join(f"{size(nbytes)} {use}" for use, nbytes in uses[:4])
    return (
        f"ebb: a budget of {given} is too small; the lowest possible budget is {least}. "
        f"{size(base)} are in use when the step begins, and the step allocates {size(peak)} even "
        f"with everything recomputed: {parts}. {_remedy(uses[0][0])}"
    )


def _remedy(use: str) -> str:
    """A remedy for a peak with this main use."""
    if use == OUTSIDE:
        return (
            "Move the operators between blocks into the forward of a module, so that ebb can "
            "recompute them, or use a smaller batch"
        )
    return (
        "Use a smaller batch, or move parameters or optimizer states off the device (sharding, CPU "
        "offload)"
    )


def cuts_of(chooser: Chooser, chosen: Chosen) -> tuple[Cut, ...]:
    """One cut for each group of regions that ran the same and got the same choice, in order."""
    groups: dict[tuple[int, object], list[str]] = {}
    for region, point in chosen.items():
        groups.setdefault((chooser.alike[region], point.choice), []).append(region)
    return tuple(_cut(regions, chooser, chosen) for regions in groups.values())


def _cut(regions: list[str], chooser: Chooser, chosen: Chosen) -> Cut:
    name, point = ", ".join(in_ranges(regions)), chosen[regions[0]]
    choice = point.choice
    if choice is EAGER:
        return Cut(name, len(regions), False, point.resident, point.added, {}, {}, {}, {}, {})
    simulator, call = chooser.simulator, chooser.calls[regions[0]][0]
    step = simulator.step
    kept, away, paged, freed, often = (Counter[str]() for _ in range(5))
    times: dict[str, float] = {}
    replayed = simulator.replayed(call, choice)
    for index, op in enumerate(step.calls[call].operators):
        operator = step.operators[op]
        op_name = operator.func_name.removeprefix("aten::").removesuffix(".default")
        values = [step.values[value] for value in operator.outputs]
        if index in choice.kept:
            for value in values:
                if index in choice.paged and has_rows(value):
                    paged[op_name] += _live(value)
                else:
                    (away if index in choice.offloaded else kept)[op_name] += value.memory
        elif op in replayed:
            freed[op_name] += sum(value.memory for value in values if value.saved)
            time = replayed[op] * simulator.replay_time(op)
            times[op_name] = times.get(op_name, 0.0) + time
            often[op_name] += replayed[op] if index in choice.each_time else 0
    inputs = [
        step.values[value] for value in step.inputs_of(step.calls[call]) if step.may_offload(value)
    ]
    if choice.inputs:
        away[_INPUTS] = sum(value.memory for value in inputs)
    if choice.paged_inputs:
        paged[_INPUTS] = sum(_live(value) for value in inputs if has_rows(value))
    return Cut(
        name,
        len(regions),
        True,
        point.resident,
        point.added,
        dict(kept.most_common()),
        {op: (freed[op], times[op]) for op in sorted(times, key=lambda op: -times[op])},
        dict(away.most_common()),
        dict(paged.most_common()),
        {op: count for op, count in often.most_common() if count > 0},
    )


def _live(value: Value) -> int:
    """Bytes of the valid rows."""
    return value.live_rows * (value.memory // value.rows)

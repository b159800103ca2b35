"""Plans in words."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from ebb._plan.choice import PLAIN
from ebb._plan.choose import Chooser, Chosen
from ebb._policy.policy import Policy
from ebb._report.text import size
from ebb._support.names import in_ranges


class Plan(Protocol):
    """What is told of an ``ebb.Plan``."""

    policies: dict[str, Policy]
    budget: int
    peak: int
    duration: float
    plain_peak: int
    plain_duration: float


def summary(plan: Plan) -> str:
    """One line."""
    if not plan.policies:
        return (
            f"ebb: the step fits as it is ({size(plan.plain_peak)} of {size(plan.budget)}): "
            "nothing is recomputed, and no module is a region"
        )
    share = plan.peak / max(1, plan.plain_peak)
    slower = plan.duration / plan.plain_duration - 1
    regions = ", ".join(in_ranges(name or "the model" for name in plan.policies))
    many = "region" if len(plan.policies) == 1 else "regions"
    return (
        f"ebb: {len(plan.policies)} {many} ({regions}); the step will allocate {size(plan.peak)}, "
        f"{share:.0%} of {size(plan.plain_peak)}, and take {slower:.1%} more time"
    )


def explained(plan: Plan, chooser: Chooser, chosen: Chosen) -> str:
    """A paragraph for each kind of region."""
    lines = [summary(plan).removeprefix("ebb: "), ""]
    groups: dict[tuple[int, object], list[str]] = {}
    for region, point in chosen.items():
        groups.setdefault((chooser.alike[region], point.choice), []).append(region)
    for regions in groups.values():
        lines += _of_group(regions, chooser, chosen)
    return "\n".join(lines)


def _of_group(regions: list[str], chooser: Chooser, chosen: Chosen) -> list[str]:
    name = ", ".join(in_ranges(regions))
    point = chosen[regions[0]]
    call = chooser.calls[regions[0]][0]
    if point.choice is PLAIN:
        return [f"{name}: no region; {size(point.held)} each are kept, as in plain eager"]
    step = chooser.simulator.step
    kept: Counter[str] = Counter()
    away: Counter[str] = Counter()
    again: Counter[str] = Counter()
    times: Counter[str] = Counter()
    often: Counter[str] = Counter()
    replayed = chooser.simulator.replayed(call, point.choice)
    for place, number in enumerate(step.calls[call].operators):
        op = step.operators[number].func_name.removeprefix("aten::").removesuffix(".default")
        if place in point.choice.saved:
            kept[op] += sum(step.values[value].memory for value in step.operators[number].outputs)
        elif place in point.choice.offloaded:
            away[op] += sum(step.values[value].memory for value in step.operators[number].outputs)
        elif number in replayed:
            saved = [v for v in step.operators[number].outputs if step.values[v].saved]
            again[op] += sum(step.values[value].memory for value in saved)
            runs = replayed[number]
            times[op] += runs * chooser.simulator.replay_time(number)  # type: ignore[assignment]
            if place in point.choice.each_time and runs > 1:
                often[op] += runs
    lines = [f"{name}: {size(point.held)} each are kept, {point.added:.2f} ms each are added"]
    if kept:
        lines.append("  kept: " + _sizes(kept))
    if away or point.choice.inputs:
        parts = [_sizes(away)] if away else []
        parts += ["what it reads"] if point.choice.inputs else []
        lines.append("  moved to the host, and back: " + ", ".join(parts))
    if again:
        parts = [f"{op} ({size(again[op])} given up, {t:.2f} ms)" for op, t in times.most_common()]
        lines.append("  made again: " + ", ".join(parts))
    if often:
        parts = [f"{op} ({count} times)" for op, count in often.most_common()]
        lines.append("  of these, each time that something is made of them: " + ", ".join(parts))
    return lines


def _sizes(operators: Counter[str]) -> str:
    return ", ".join(f"{op} ({size(nbytes)})" for op, nbytes in operators.most_common())


def least_explained(
    budget: int | float,
    base: int,
    plain_peak: int,
    peak: int,
    minimum: int,
    chooser: Chooser,
    chosen: Chosen,
) -> str:
    """Why a budget is too small."""
    if isinstance(budget, float):
        share = peak / max(1, plain_peak)
        asked, least = f"{budget:.1%}", f"{share + 0.0051:.0%}, or {size(minimum)} all told"
    else:
        asked, least = size(budget), size(minimum)
    makers = chooser.who_holds(chosen)
    parts = ", ".join(f"{size(held)} {who}" for who, held in makers[:4])
    return (
        f"ebb: a budget of {asked} is too small: the least is {least}. "
        f"{size(base)} are there when the step begins; with all recomputed it takes "
        f"{size(peak)} more: {parts}. A smaller batch, or parameters and states elsewhere, would "
        "make room"
    )

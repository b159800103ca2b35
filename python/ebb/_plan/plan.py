"""Plans. In: a measured step and a memory budget. Out: a policy for each region, and the cost."""

from __future__ import annotations

import glob
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ebb import _C
from ebb._config import config
from ebb._plan.apply.described import course_of, measured_course, paragraphs, reported, too_small
from ebb._plan.apply.module_policies import ModulePolicies, RegionHandles
from ebb._plan.apply.restore_training_state import restore_training_state
from ebb._plan.choose.chooser import Chooser, Chosen
from ebb._plan.choose.memory_budget import BudgetError, NothingToPlanError, allowed, read_budget
from ebb._plan.choose.stacks import Stacked, find_stacks
from ebb._plan.measure import measure
from ebb._plan.profile.measuring import Measured
from ebb._plan.profile.profile import Profile, from_first_operator
from ebb._plan.profile.recording import Purpose, run
from ebb._plan.simulate.choice import EAGER, policy_of
from ebb._plan.simulate.simulator import Simulator
from ebb._policy.policy import Policy
from ebb._region.blocks import block_candidates
from ebb._report import planned
from ebb._report.text import price, size
from ebb._support import devices
from ebb._support.job import print_first
from ebb._support.names import in_ranges
from ebb._support.shown import clipped, shown
from ebb._support.sizes import whole_number

_NOTED, _UNKNOWN = 0.1, 0.3  # spread from which it is named; from which times count as unknown


@dataclass(frozen=True)
class ParetoPoint:
    """Predicted memory and time for one budget.

    Attributes:
        budget: bytes that the step may allocate.
        peak: peak bytes that it will allocate.
        duration: milliseconds.
        replays: how many operators are recomputed.
    """

    budget: int
    peak: int
    duration: float
    replays: int


class Pareto(Sequence[ParetoPoint]):
    """Points from the lowest to the highest budget. ``str()`` gives a table.

    Attributes:
        plain_peak, plain_duration: peak and time of the step without regions.
    """

    def __init__(self, points: Sequence[ParetoPoint], peak: int, duration: float) -> None:
        self._points = tuple(points)
        self.plain_peak, self.plain_duration = peak, duration

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: Any) -> Any:
        return self._points[index]

    def __str__(self) -> str:
        lines = ["  budget        peak  of eager  time ms  of eager  replays"]
        for point in self._points:
            lines.append(
                f"{size(point.budget):>10}  {size(point.peak):>10}  "
                f"{point.peak / max(1, self.plain_peak):8.1%}  {point.duration:7.1f}  "
                f"{point.duration / self.plain_duration:8.3f}  {point.replays:7}"
            )
        return "\n".join(lines)


class Plan:
    """A checkpointing plan made by ``ebb.plan``: which modules become regions, and their
    policies.

    Attributes:
        policies: policy by the module's fully qualified name. Modules without one stay unchanged.
        budget: bytes that the step may allocate above those in use when it begins. Gradients that
            the step frees first do not count as in use.
        peak: predicted peak of the step's allocations, in bytes.
        duration: predicted time of the step, in milliseconds.
        plain_peak, plain_duration: the same for the step without regions.
        spread: relative difference between the slowest and the fastest measured step.
            ``duration`` has at least this error.
        replays: how many operators are recomputed.
        pool_bytes: bytes of ``peak`` that page pools use.
    """

    def __init__(
        self,
        chooser: Chooser,
        measured: Measured,
        budget: int,
        chosen: Chosen,
        base: int | None = None,
    ) -> None:
        """`base`: bytes in use when a step begins, if the budget includes them."""
        policies = _policies(chooser, chosen, measured.whole)
        self._regions = ModulePolicies(
            policies,
            _transfers(chooser, chosen),
            ahead=chooser.simulator.ahead or not (policies and ahead_is_on()),
        )
        estimate = chooser.estimate(chosen)
        self.budget = budget
        self.peak, self.duration = estimate.peak, estimate.duration
        plain = chooser.simulator.plain
        self.plain_duration = plain.duration
        self.plain_peak = plain.peak
        self.spread = measured.spread
        self._chooser, self._chosen, self._base = chooser, chosen, base
        self._reported: planned.ReportedPlan | None = None  # made by the last apply()
        self._others = ""  # why modules are not regions, for the summary

    @property
    def replays(self) -> int:
        return self._chooser.estimate(self._chosen).replays

    @property
    def pool_bytes(self) -> int:
        return self._chooser.simulator.pool_bytes(self._chooser.of_calls(self._chosen))

    @property
    def policies(self) -> dict[str, Policy]:
        return self._regions.policies

    def apply(self, model: torch.nn.Module) -> RegionHandles:
        """Make the planned modules of a model regions, as ``ebb.ModulePolicies.apply``."""
        handles = self._regions.apply(model)
        self._reported = self._for_reports()
        planned.begins(self._reported)
        handles._undo.callback(planned.ends, self._reported)
        weakref.finalize(model, planned.forget, self._reported)
        return handles

    def save(self, path: str | Path) -> None:
        """Write the policies to a file for ``EBB=`` or ``ebb.ModulePolicies.load``, as
        ``ebb.ModulePolicies.save``. The file does not contain the measurements. Where regions
        are disabled, an earlier file stays, and ebb prints a line."""
        if self._others and not self.policies:
            print_first(f"ebb: {shown(str(path))} is not written: {self._others}")
            return
        self._regions.save(path)

    def _for_reports(self, measured: Measured | None = None) -> planned.ReportedPlan:
        """The plan as reports show it, or instead the step `measured`, in which everything was
        recomputed."""
        if measured is None:
            return reported(self._chooser, self._chosen, self.budget, self.policies)
        chooser = Chooser(Simulator(measured))
        course = course_of(measured.profile, measured.duration)
        return reported(chooser, chooser.recomputed(), self.budget, self.policies, course)

    def measure(self, step: Callable[[], object]) -> Profile:
        """Run a step five times under this plan. Reports of steps under it show the measured values
        beside the predicted ones.

        Args:
            step: the planned step. The plan must be applied.

        Returns:
            The profile of one of the steps. Recording makes that step slower.

        Raises:
            RuntimeError: the plan is not applied; or as ``ebb.profile``.
        """
        if self._reported is None or not planned.is_in_place(self._reported):
            raise RuntimeError(
                "ebb: Plan.measure needs an applied plan: call plan.apply(model) first"
            )
        steps = _C.set_reporting(0)
        try:
            purposes = (Purpose.WARM_UP, Purpose.PROFILE, *[Purpose.TIME] * 3)
            _, (_, recorded), *timed = run(step, purposes)
        finally:
            _C.set_reporting(steps)
        assert recorded is not None
        profile, _ = from_first_operator(recorded)
        self._reported.measured = measured_course(profile, min(duration for duration, _ in timed))
        return profile

    def summary(self) -> str:
        """The plan in one line."""
        if not self.policies:
            total = self._in_total(self.plain_peak) or f" of {size(self.budget)}"
            fits = f"the step fits as it is ({size(self.plain_peak)}{total})"
            why = self._others or fits
            return f"ebb: {why}: nothing is recomputed, and no module is a region"
        share = self.peak / max(1, self.plain_peak)
        regions = ", ".join(in_ranges(name or "the model" for name in self.policies))
        many = "region" if len(self.policies) == 1 else "regions"
        ahead = "" if self._regions._settings.ahead else ", without replays ahead of backward"
        return (
            f"ebb: {len(self.policies)} {many} ({regions}); predicted peak {size(self.peak)} "
            f"({share:.0%} of eager's {size(self.plain_peak)}){self._in_total(self.peak)}, "
            f"{self._more_time()}{ahead}{self._others}"
        )

    def _in_total(self, peak: int) -> str:
        """For a budget in bytes: what the step's peak does not include, and the sum."""
        if self._base is None:
            return ""
        total = size(peak + self._base)
        return f" plus {size(self._base)} of weights and other tensors: {total} in total"

    def _more_time(self) -> str:
        if self.spread > _UNKNOWN:
            return "more time by an unknown amount (the times of profiled steps vary too much)"
        noted = f" (times of profiled steps vary by {self.spread:.0%})"
        return price(self.duration / self.plain_duration) + noted * (self.spread > _NOTED)

    def __repr__(self) -> str:
        return f"<ebb.Plan: {self.summary().removeprefix('ebb: ')}>"

    def explain(self) -> str:
        """Describe what each region saves and recomputes, and the cost."""
        summary = self.summary().removeprefix("ebb: ")
        return "\n".join([summary, "", *paragraphs(self._chooser, self._chosen)])

    def pareto(self, points: int = 20) -> Pareto:
        """Predict memory and time for other budgets.

        Args:
            points: how many budgets, from the lowest possible one to one that recomputes nothing.

        Raises:
            TypeError: ``points`` is no int.
            ValueError: ``points`` is less than 2.
        """
        whole_number("points", points, least=2)
        curve = []
        for budget, _, estimate in self._chooser.curve(points):
            curve.append(ParetoPoint(budget, estimate.peak, estimate.duration, estimate.replays))
        return Pareto(curve, self.plain_peak, self.plain_duration)


def _policies(chooser: Chooser, chosen: Chosen, whole: str | None) -> dict[str, Policy]:
    policies: dict[str, Policy] = {}
    step = chooser.simulator.step
    for region, point in chosen.items():
        if point.choice is EAGER:
            continue
        of_stack = chooser.stacked and chooser.stacked.policies(region, point.choice)
        if of_stack:
            policies |= of_stack
            continue
        names = step.names_of(chooser.calls[region][0])
        policies["" if region == whole else region] = policy_of(point.choice, names)
    return policies


def _transfers(chooser: Chooser, chosen: Chosen) -> dict[str, int]:
    """Settings of OFFLOAD that reproduce the simulated copies; empty if nothing is offloaded."""
    if not any(point.sends for point in chosen.values()):
        return {}
    window, least = chooser.simulator.window, chooser.simulator.link.least
    return {
        "min_bytes": least,
        "in_flight_bytes": window,
        "prefetch_bytes": window,
        "keep_last": 0,
    }


def plan_of(measured: Measured, budget: int | float, *, at_least: bool = False) -> Plan:
    """Make the plan for a measured step.

    Args:
        budget: bytes in total, or a share, see ``ebb.plan``.
        at_least: if the budget is too small, return the plan with the lowest peak.

    Raises:
        BudgetError: the budget is too small, and ``at_least`` is False.
        ValueError: no region ran forward and backward.
    """
    # One chooser uses neither OFFLOAD nor PAGE, others use one of them or both.
    links, pagers = dict.fromkeys((None, measured.link)), dict.fromkeys((None, measured.pager))
    choosers = [
        Chooser(Simulator(replace(measured, link=link, pager=pager), ahead))
        for ahead in ((True, False) if ahead_is_on() else (False,))
        for link in links
        for pager in pagers
    ]
    chooser = choosers[-len(links) * len(pagers)]  # the first without replays ahead
    simulator = chooser.simulator
    if not any(call.unpacked for call in simulator.step.calls):
        raise NothingToPlanError(
            "ebb: there is nothing to plan: no block of the model ran forward and backward in the "
            "step. Check that the step runs the model's backward, or name modules (modules=, "
            "EBB_MODULES)"
        )
    plain = simulator.plain.peak
    bytes_allowed = allowed(budget, measured.base, plain)
    if isinstance(budget, float) and budget == 1.0:
        bytes_allowed = plain  # with a margin, the eager step would not fit
    stacks = find_stacks(simulator.step, measured.parents)
    if stacks and chooser.made_once(bytes_allowed) is None:  # several blocks in each region
        stacked = Stacked(measured, simulator, stacks)
        choosers.append(Chooser(stacked.simulator, stacked))
    fastest = _fastest(choosers, bytes_allowed)
    if fastest is None:
        chooser, chosen = min(
            ((chooser, chooser.least()) for chooser in choosers),
            key=lambda pair: pair[0].estimate(pair[1]).peak,
        )
        if not at_least:
            raise too_small(budget, measured.base, chooser, chosen)
        peak = chooser.estimate(chosen).peak
        fastest = _fastest([chooser], peak) or (chooser, chosen)
    base = measured.base if isinstance(budget, int) else None
    return Plan(fastest[0], measured, bytes_allowed, fastest[1], base)


def ahead_is_on() -> bool:
    return config.ahead.regions > 0


def _fastest(choosers: Iterable[Chooser], budget: int) -> tuple[Chooser, Chosen] | None:
    """The fastest choice of all choosers. If copies are the bottleneck, a chooser that offloads
    does not try to copy less, so choosers without copies compete too."""
    chosen = ((chooser, chooser.choose(budget)) for chooser in choosers)
    fitting = [(chooser, choices) for chooser, choices in chosen if choices is not None]
    return min(fitting, key=lambda pair: pair[0].estimate(pair[1]).duration, default=None)


def plan(
    model: torch.nn.Module,
    step: Callable[[], object],
    budget: int | float | str,
    *,
    modules: str | Iterable[str] | None = None,
) -> Plan:
    """Choose which activations to save, so that a step stays within a memory budget and takes the
    least time.

    ebb runs the step about eight times, with every block recomputed. Then ebb decides for each
    saved tensor whether saving or recomputing it costs less. Blocks that run the same operators get
    the same decisions where the budget allows it. ``plan.apply(model)`` makes the blocks regions;
    until then the model is as before. The model's gradients and buffers, and torch's random states,
    are restored at the end. Other effects of the steps remain, such as an optimizer's step.

    Args:
        model: must not contain a region yet.
        step: runs the model's forward and backward, and anything else that belongs to a step.
            Each call must run the same operators.
        budget: bytes, an int or text such as ``"24GiB"``. The budget includes the memory in use
            when the step begins: on the CPU, the model's parameters, their gradients and buffers;
            on an accelerator, all that is allocated there. Or a share, a float or text such as
            ``"40%"``, of the step's peak without regions.
        modules: globs of modules that may become regions, as for ``ebb.apply``. Default: the
            repeated blocks of the model. Blocks do not cover the activations between them. So if no
            plan with blocks fits the budget, ebb tries the model's parts, then the model as one
            region.

    Returns:
        A ``Plan``. If the step fits unchanged, or where regions are disabled, no module
        becomes a region.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is invalid; or no module that may be a region runs in the step; or
            the step has a region already; or the accelerator's allocator counts no bytes.
        BudgetError: the budget is too small. The message names the lowest possible budget and what
            needs the memory.
        RuntimeError: the calls of ``step`` ran different operators.

    Examples:
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 64),
        ...     torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(4)))
        >>> x = torch.ones(16, 32)
        >>> plan = ebb.plan(model, lambda: model(x).sum().backward(), budget=0.8)
        >>> plan.peak < plan.plain_peak
        True
        >>> handle = plan.apply(model)
    """
    if not callable(step):
        raise TypeError(f"ebb: step must be a function; got {type(step).__name__}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: model must be a torch.nn.Module; got {type(model).__name__}")
    if why := devices.why_uncounted():
        raise ValueError(f"ebb: {why}")
    given = read_budget(budget)
    chosen = None if modules is None else _globs(modules)
    with restore_training_state(model):
        return _planned(model, step, given, chosen)


def _planned(
    model: torch.nn.Module,
    step: Callable[[], object],
    given: int | float,
    modules: Sequence[str] | None,
) -> Plan:
    if _C.regions_are_disabled():
        return _without_regions(measure(step, model, modules or [""]), given)
    if modules is not None:
        return plan_of(measure(step, model, modules, given), given)
    tried: list[tuple[BudgetError, str]] = []
    for names in block_candidates(model):
        measured = measure(step, model, [glob.escape(name) for name in names], given)
        try:
            found = plan_of(measured, given)
        except BudgetError as error:
            tried.append((error, ", ".join(in_ranges(name or "the model" for name in names))))
        else:
            if tried and found.policies:
                found._others = f"; lowest budget of faster choices of regions: {_lowest(tried)}"
            return found
    least, _ = min(tried, key=lambda pair: pair[0].minimum)
    raise BudgetError(
        f"{least}. Lowest possible budget for each choice of regions: {_lowest(tried)}",
        least.minimum,
        least.share,
        least.slowdown,
    )


def _without_regions(measured: Measured, budget: int | float) -> Plan:
    chooser = Chooser(Simulator(measured))
    plan = Plan(chooser, measured, allowed(budget, measured.base, chooser.simulator.plain.peak), {})
    plan._others = "regions are disabled (EBB_DISABLE=1 or ebb.disable())"
    return plan


def _lowest(tried: Iterable[tuple[BudgetError, str]]) -> str:
    return "; ".join(
        f"{error.share:.0%} ({size(error.minimum)} in total) with {clipped(what, 100)}, at "
        f"{price(error.slowdown)}"
        for error, what in tried
    )


def _globs(modules: str | Iterable[str]) -> Sequence[str]:
    if not isinstance(modules, Iterable):
        raise TypeError(
            f"ebb: modules must be a string or an iterable of strings; got {shown(modules)}"
        )
    return [modules] if isinstance(modules, str) else list(modules)

"""Measures a step that ebb can run as a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ebb import _C, ahead
from ebb._plan.budget import allowed
from ebb._plan.callers import Callers
from ebb._plan.link import measure_link, transfers_of
from ebb._plan.measured import Measured, base_bytes, spread_of
from ebb._plan.pages import StepsThatRunAgain
from ebb._plan.profile import Profile, profile
from ebb._plan.simulate import Simulator
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._region.apply import apply
from ebb._support import devices
from ebb._support.shown import shown
from ebb.policies import recompute_all

_ROUNDS = 3


def measure(
    step: Callable[[], object],
    model: torch.nn.Module,
    modules: Sequence[str],
    budget: int | float = 1.0,
) -> Measured:
    """Run a step about eight times, with regions that recompute everything.

    Args:
        step: runs a forward of the model and its backward.
        model: as in :func:`ebb.plan`.
        modules: globs of modules that become regions.
        budget: the budget to plan for. Steps that offload everything run only if they stay within
            it, or within the peak measured before.

    Raises:
        ValueError: the step has a region already; or as :func:`ebb.apply`.
        RuntimeError: as :func:`ebb.profile`.
    """
    regions = ahead.configure()["regions"]
    ahead.configure(regions=0)  # measure the full time of replays, not what stays visible
    try:
        return _measure(step, model, modules, budget)
    finally:
        ahead.configure(regions=regions)


def _measure(
    step: Callable[[], object],
    model: torch.nn.Module,
    modules: Sequence[str],
    budget: int | float,
) -> Measured:
    with apply(model, recompute_all, modules) as handle:
        parents = _parents(step, model, [name for name in handle.names if name])
        base = base_bytes([model])  # after a step, so that gradients count
        may_run_again = StepsThatRunAgain()
        found = profile(step, steps=2)
        whole = type(model).__name__ if "" in handle.names else None
        _check_regions(found, {name or type(model).__name__ for name in handle.names})
        durations = [_timed(step) for _ in range(_ROUNDS)]
    device = device_of([model])
    measured = Measured(
        found,
        min(durations),
        base,
        whole=whole,
        root=type(model).__name__,
        parents=parents,
        link=measure_link(device),
        pager=may_run_again.pager(found, device),
        on_accelerator=device.type != "cpu",
        spread=spread_of(durations),
    )
    if may_send_all(measured, budget):
        window = Simulator(measured).window
        measured = replace(measured, away=_away(step, model, modules, window))
    return measured


def may_send_all(measured: Measured, budget: int | float) -> bool:
    """True if a step that offloads all saved tensors stays within the budget, or within the
    measured peak."""
    if measured.link is None:
        return False
    simulator = Simulator(measured)
    most = allowed(budget, measured.base, simulator.plain.peak)
    return simulator.estimate(simulator.all_away).peak <= max(most, measured.profile.peak)


def _away(
    step: Callable[[], object], model: torch.nn.Module, modules: Sequence[str], window: int
) -> float:
    with (
        transfers_of(in_flight_bytes=window, prefetch_bytes=window),
        apply(model, Policy(default=OFFLOAD), modules),
    ):
        step()  # allocates host memory, which later steps reuse
        return min(_timed(step) for _ in range(_ROUNDS))


def _parents(
    step: Callable[[], object], model: torch.nn.Module, names: Iterable[str]
) -> dict[str, str]:
    """By module name, the name of the module whose forward calls it."""
    found = {name: parent_of(model, name) for name in names}
    get = model.get_submodule
    callers = Callers((name, get(name), get(parent)) for name, parent in found.items())
    try:
        step()
    finally:
        inside = callers.close()
    return {name: parent for name, parent in found.items() if name in inside}


def parent_of(model: torch.nn.Module, name: str) -> str:
    """The name of the nearest module around this one that has a forward, unlike ModuleList and
    ModuleDict."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(name), torch.nn.ModuleList | torch.nn.ModuleDict):
            break
    return name


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU if there is none."""
    parameters = (parameter for model in models for parameter in model.parameters())
    return next((one.device for one in parameters), torch.device("cpu"))


def devices_of(model: torch.nn.Module) -> set[torch.device]:
    """All devices of a model's parameters."""
    found = {one.device for one in model.parameters() if one.device.type != "meta"}
    return found or {torch.device("cpu")}


def _check_regions(found: Profile, known: set[str]) -> None:
    others = {one.region for one in found.operators} - known
    if others:
        raise ValueError(
            f"ebb: the step has a region already: {shown(min(others))}. A plan decides which "
            "modules become regions; take that one out first"
        )


def measure_again(step: Callable[[], object]) -> tuple[Profile, float]:
    """Profile and time a step under the plan in place. The time is without recording."""
    steps = _C.set_reporting(0)
    try:
        found = profile(step, steps=1)
        return found, min(_timed(step) for _ in range(_ROUNDS))
    finally:
        _C.set_reporting(steps)


def _timed(step: Callable[[], object]) -> float:
    devices.wait()
    begin = time.perf_counter()
    step()
    devices.wait()
    return (time.perf_counter() - begin) * 1e3

"""Measures the steps of `ebb.plan`. In: a function that runs a step. Out: a `Measured`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ebb._config import config
from ebb._plan.choose.memory_budget import allowed
from ebb._plan.profile.measuring import Measured, MeasureSequence, base_bytes, device_of
from ebb._plan.profile.profile import Profile
from ebb._plan.profile.recording import run
from ebb._plan.simulate.simulator import Simulator
from ebb._region.apply import apply
from ebb._support.shown import shown
from ebb.policies import recompute_all


def measure(
    step: Callable[[], object],
    model: torch.nn.Module,
    modules: Sequence[str],
    budget: int | float = 1.0,
) -> Measured:
    """Run a step of ``ebb.plan`` about eight times, with regions that recompute everything.
    `budget`: as in `window_of_all`.

    Raises:
        ValueError: the step has a region already; or as ``ebb.apply``.
        RuntimeError: as ``ebb.profile``.
    """
    root = type(model).__name__
    with ExitStack() as undo:
        # Replays ahead would hide part of the replay time.
        undo.enter_context(config.patch(ahead_regions=0))
        with apply(model, recompute_all, modules) as handle:
            parents = _parents(step, model, [name for name in handle.names if name])
            sequence = MeasureSequence(
                device_of([model]), lambda measured: window_of_all(measured, budget), in_job=False
            )
            sequence.base = base_bytes([model])  # after a step, so that gradients count
            for duration, profile in run(step, sequence.purposes()):
                if profile is not None:
                    _check_regions(profile, {name or root for name in handle.names})
                sequence.record(duration, profile)
        if sequence.window is not None:
            with sequence.transfers(), apply(model, sequence.policy, modules):
                for ended in run(step, sequence.purposes()):
                    sequence.record(*ended)
    whole = root if "" in handle.names else None
    return replace(sequence.measured(), parents=parents, root=root, whole=whole)


def window_of_all(measured: Measured, budget: int | float) -> int | None:
    """Bytes in flight in steps that offload all saved tensors; None if such a step would exceed
    both the budget and the measured peak."""
    if measured.link is None:
        return None
    simulator = Simulator(measured)
    most = max(allowed(budget, measured.base, simulator.plain.peak), measured.profile.peak)
    fits = simulator.estimate(simulator.all_offloaded).peak <= most
    return simulator.window if fits else None


def _parents(
    step: Callable[[], object], model: torch.nn.Module, names: Iterable[str]
) -> dict[str, str]:
    """By module name, the name of the module whose forward calls it."""
    parents = {name: parent_of(model, name) for name in names}
    get = model.get_submodule
    callers = Callers((name, get(name), get(parent)) for name, parent in parents.items())
    try:
        step()
    finally:
        inside = callers.close()
    return {name: parent for name, parent in parents.items() if name in inside}


def _check_regions(profile: Profile, known: set[str]) -> None:
    others = {operator.region for operator in profile.operators} - known
    if others:
        raise ValueError(
            f"ebb: the step already runs a region, {shown(min(others))}. ebb.plan chooses the "
            "regions itself: remove that ebb.apply, ebb.region or checkpoint call first"
        )


class Callers:
    """Observes with hooks, until `close`, whether modules run in the forward of the module around
    them. They do not if another module, or a method other than forward, calls them."""

    def __init__(self, pairs: Iterable[tuple[str, torch.nn.Module, torch.nn.Module]]) -> None:
        """`pairs`: names of modules, with each module and the module around it."""
        self._running: Counter[int] = Counter()  # by id, so that hooks keep no model alive
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._hooks: list[Any] = []
        around = set()
        for name, module, outer in pairs:
            look = partial(self._look, name, id(outer))
            self._hooks.append(module.register_forward_pre_hook(look))
            around.add(outer)
        for outer in around:
            self._hooks.append(outer.register_forward_pre_hook(self._begins))
            self._hooks.append(outer.register_forward_hook(self._ends, always_call=True))

    def _look(self, name: str, outer: int, module: torch.nn.Module, args: object) -> None:
        (self._inside if self._running[outer] else self._outside).add(name)

    def _begins(self, module: torch.nn.Module, args: object) -> None:
        self._running[id(module)] += 1

    def _ends(self, module: torch.nn.Module, args: object, result: object) -> None:
        self._running[id(module)] -= 1

    def close(self) -> set[str]:
        """Remove the hooks. Returns the names of the modules that ran, each time in the forward of
        the module around them."""
        while self._hooks:
            self._hooks.pop().remove()
        return self._inside - self._outside


def parent_of(model: torch.nn.Module, name: str) -> str:
    """The name of the nearest module around this one that has a forward, unlike ModuleList and
    ModuleDict."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(name), torch.nn.ModuleList | torch.nn.ModuleDict):
            break
    return name

"""What a plan is made from: one step that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ebb._plan.pages import Pager
from ebb._plan.profile import Profile
from ebb._plan.transfers import Link
from ebb._support import devices


@dataclass(frozen=True)
class Measured:
    """One step of a program.

    Attributes:
        profile: of the step in which each block is a region under ``ebb.policies.recompute_all``.
        duration: milliseconds of such a step, without recording.
        spread: by how much of it the slowest of the steps that were timed took longer.
        base: bytes that are there when a step begins: weights, state of optimizers.
        whole: the name of the region that is the model itself; None: there is none.
        root: the name of a region that is the model itself would have.
        parents: by the name of a region, that of the module whose forward calls it, "" for the
            model; none: that is not known.
        link: how fast bytes leave memory and come back; None: they cannot.
        away: milliseconds of a step in which all that autograd keeps leaves; None: it was not run.
        pager: how rows that live go to page pools; None: there are none, or they may not.
        on_accelerator: whether the host does not wait for what operators do.
    """

    profile: Profile
    duration: float
    base: int
    whole: str | None = None
    root: str = ""
    parents: Mapping[str, str] = field(default_factory=dict)
    link: Link | None = None
    away: float | None = None
    pager: Pager | None = None
    on_accelerator: bool = False
    spread: float = 0.0


def spread_of(durations: Sequence[float]) -> float:
    """By how much of the least the longest is longer."""
    return max(durations) / max(min(durations), 1e-6) - 1


def base_bytes(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> int:
    """Bytes of what models and optimizers hold now: parameters, their gradients, buffers, state.

    On an accelerator: all that is allocated on it.
    """
    tensors: list[Any] = []
    for model in models:
        for parameter in model.parameters():
            tensors += [parameter, parameter.grad]
        tensors += model.buffers()
    for optimizer in optimizers:
        tensors += [one for state in optimizer.state.values() for one in state.values()]
    held = {
        one.untyped_storage()._cdata: one.untyped_storage().nbytes()
        for one in tensors
        if isinstance(one, torch.Tensor) and _has_storage(one)
    }
    return max(sum(held.values()), devices.allocated())


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True

"""The measurements from which a plan is made."""

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
    """Measurements of a step.

    Attributes:
        profile: of a step in which each block is a region under ``ebb.policies.recompute_all``.
        duration: milliseconds of such a step, without recording.
        base: bytes in use when a step begins, such as parameters and optimizer states.
        whole: name of the region that is the model itself; None: there is none.
        root: name that such a region would have.
        parents: by region name, the name of the module whose forward calls it, "" for the model;
            without an entry it is unknown.
        link: speed of offloading; None: values cannot be offloaded.
        away: milliseconds of a step that offloads all saved tensors; None: no such step was run.
        pager: how valid rows go to page pools; None: no rows, or no paging.
        on_accelerator: True if operators run asynchronously to the host.
        spread: relative difference between the slowest and the fastest timed step.
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
    """Relative difference between the longest and the shortest duration."""
    return max(durations) / max(min(durations), 1e-6) - 1


def base_bytes(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> int:
    """Current bytes of models and optimizers: parameters, gradients, buffers, optimizer states.

    On an accelerator: at least all that is allocated on it.
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

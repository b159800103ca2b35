"""The input of a plan. In: a profile, durations and bytes. Out: a `Measured`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ebb._plan.pages import Pager
from ebb._plan.profile import Profile
from ebb._plan.transfers import Link
from ebb._support import devices


@dataclass(frozen=True)
class Measured:
    """Measurements of a step in which each block is a region under `recompute_all`."""

    profile: Profile
    duration: float  # milliseconds of such a step, without recording
    # Bytes in use when a step begins, such as parameters and optimizer states. See Note [Where a
    # step begins].
    base: int
    freed: int = 0  # bytes that are freed between the end of a step and this begin
    whole: str | None = None  # name of the region that is the model itself; None: there is none
    root: str = ""  # name that such a region would have
    # By region name, the name of the module whose forward calls it, "" for the model; without an
    # entry it is unknown.
    parents: Mapping[str, str] = field(default_factory=dict)
    link: Link | None = None  # None: values cannot be offloaded
    away: float | None = None  # milliseconds of a step that offloads all saved tensors
    pager: Pager | None = None  # None: no rows, or no paging
    on_accelerator: bool = False  # True if operators run asynchronously to the host
    spread: float = 0.0  # relative difference between the slowest and the fastest timed step


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
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and _has_storage(tensor)
    }
    return max(sum(sizes.values()), devices.allocated())


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True

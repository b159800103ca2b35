"""Programs in which something writes to a computed tensor, perhaps without torch's knowledge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Write = Callable[[torch.Tensor], Any]


def read_alone(x: torch.Tensor, write: Write) -> torch.Tensor:
    h = x * 2
    write(h.detach())
    return h.sin() * x


def packed_before(x: torch.Tensor, write: Write) -> torch.Tensor:
    h = x * 2
    y = h.sin()  # eager's saved h is the same memory, so its backward sees the write
    write(h.detach())
    return y * h.exp()


def others_made_of_it_before(x: torch.Tensor, write: Write) -> torch.Tensor:
    h = x * 2
    before = h + 1
    before = before * before.exp()
    write(h.detach())
    after = h + 1
    return before + (after * after).sin()


def written_on(x: torch.Tensor, write: Write) -> torch.Tensor:
    h = x * 2
    write(h.detach())
    h.mul_(0.5)
    y = h.sin()
    write(h.detach())
    return y + (h * x).cos()


def refused(x: torch.Tensor, write: Write) -> torch.Tensor:
    h = x * 2
    write(h.detach())
    y = h.sin()  # saves h, which torch then modifies
    h.mul_(0.5)
    write(h.detach())
    return y + (h * x).cos()


def result_packed_before(x: torch.Tensor, write: Write) -> torch.Tensor:
    h = x.exp()  # saves its result
    y = (h * x).sin()
    write(h.detach())
    return y * h.cos()


PROGRAMS = (
    read_alone,
    packed_before,
    others_made_of_it_before,
    written_on,
    refused,
    result_packed_before,
)


def outcome(
    region: AbstractContextManager[object], program: Callable[..., torch.Tensor], write: Write
) -> list[torch.Tensor | None]:
    """The result and the gradient; None in place of a gradient that backward refuses."""
    torch.manual_seed(0)
    x = torch.arange(1.0, 5.0, dtype=torch.float64).mul(0.1).requires_grad_()
    with region:
        out = program(x, write)
    shown = out.detach().clone()
    try:
        return [shown, torch.autograd.grad(out.sum(), x)[0]]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        return [shown, None]

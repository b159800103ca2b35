"""Steps: where they begin and end, what runs in them, and whether they were good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ebb import _C
from ebb._support.sizes import whole_number
from ebb.paging._agreement import Agreement
from ebb.paging._attempt import of_this_thread


@contextlib.contextmanager
def step(fixed_order: bool = True) -> Iterator[None]:
    """Bracket one training step: all its forwards and backwards.

    Optional: without brackets a step is over when nothing is paged any more.

    Args:
        fixed_order: all such steps run the same layers forward and backward in the same order,
            which is known from the first: a layer whose backward comes next is not paged, and on
            accelerators pages come back while the layer before runs backward. For pipelines, name
            stages and micro-batches with :func:`microbatch`.

    Raises:
        RuntimeError: the step runs in another order than the recorded one; the message names both
            entries, and the next step is recorded. Or a step is going on already.

    Example:
        >>> x, n = torch.randn(8, 4, requires_grad=True), torch.tensor(3)
        >>> policy = ebb.Policy({"aten::mul": ebb.PAGE})
        >>> with ebb.paging.step():
        ...     with ebb.region(policy):
        ...         h = ebb.mark_rows(x.clone(), n)
        ...         y = (h * 2).sin()[:3].sum()
        ...     y.backward()
        >>> ebb.paging.step_ok()
        True
    """
    with bracket(fixed_order, raises_late=False):
        yield


@contextlib.contextmanager
def bracket(fixed_order: bool, raises_late: bool) -> Iterator[None]:
    """`raises_late`: a pool with too little room raises only at the end of the step."""
    _C.paging_step_begins(fixed_order, raises_late)
    try:
        yield
    except BaseException:
        _C.paging_step_abandoned()
        raise
    _C.paging_step_ends()


@contextlib.contextmanager
def microbatch(index: int | None = None, stage: int = 0) -> Iterator[None]:
    """Name the micro-batch and the pipeline stage of the regions entered inside.

    Without it stages are 0, and the micro-batches of a region are counted. Only the forward needs
    it.

    Args:
        index: of the micro-batch, from 0; ``None``: counted.
        stage: of the pipeline, from 0, such as the virtual stage of an interleaved schedule.

    Raises:
        TypeError, ValueError: an argument is not a number, or negative.
    """
    for name, number in (("stage", stage), ("index", 0 if index is None else index)):
        if whole_number(name, number, "as a number") >= 2**31:
            raise ValueError(f"ebb: {name} must be below 2**31; got {number}")
    before = _C.exchange_paging_place(stage, index)
    try:
        yield
    finally:
        _C.exchange_paging_place(*before)


def step_ok(group: Any = None) -> bool:
    """Whether the gradients of the step are good: each page pool had room. Call it before the
    optimizer; in a distributed job, on every process of the group.

    Waits until the device has done what was given to the pools, which is one event for each device,
    and not for what the device was given since; where a CUDA graph has a pool, for the current
    stream too. If the answer is False clear the gradients and run the step again: the next step
    runs without pools, and larger ones are made after it. Ask once for each step of the optimizer:
    the answer is forgotten when something is paged again. An optimizer of ``torch.optim`` that is
    about to use the gradients of such a step raises :class:`PageOverflowError`.

    Args:
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            They agree through the group's store, as in :func:`run_step`.

    Raises:
        RuntimeError: something else went wrong with the pages: a count of rows that cannot be. Or a
            CUDA graph is being captured, in which nobody may wait: see :func:`found_inf`. Or other
            processes do not come within the time limit of the process group.
        PageOverflowError: something else went wrong with the pages of another process; or this is
            called in :func:`run_step`, and the step cannot be run again.
        NotImplementedError: the process group has several ranks and no store (MPI).
    """
    attempt = of_this_thread()
    if attempt is not None and attempt.agreement.is_of(group):
        return attempt.agreement.ask(_C.paging_step_ok)
    return Agreement(group).ask(_C.paging_step_ok, at_end=True)


def found_inf(device: torch.device | str) -> torch.Tensor:
    """A flag on the device that says the same as :func:`step_ok`, for which nobody waits.

    For steps that are captured whole, optimizer included: assign it to ``optimizer.found_inf`` of a
    fused or capturable optimizer, which then leaves parameters alone, as for ``GradScaler``. It
    tells of this process only: in a distributed job reduce it over the ranks (``ReduceOp.MAX``).

    Args:
        device: whose pools to look at.

    Returns:
        A float32 tensor of no dimensions: 1.0 if the gradients are of no use, else 0.0.
    """
    return _C.paging_found_inf(torch.device(device))


def reset() -> None:
    """Drop all pools and what was recorded; the next step is recorded again.

    Tensors that are paged now still come back. CUDA graphs that use a pool must have been deleted.

    Raises:
        RuntimeError: a :func:`step` is going on.
    """
    _C.paging_reset()

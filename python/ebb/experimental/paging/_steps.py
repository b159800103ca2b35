"""Steps: their bounds, their micro-batches, and the check that they were valid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ebb import _C
from ebb._support.sizes import whole_number
from ebb.experimental.paging._agreement import Agreement
from ebb.experimental.paging._attempt import of_this_thread


@contextlib.contextmanager
def step(fixed_order: bool = True) -> Iterator[None]:
    """Mark one training step: all its forwards and backwards.

    Optional: without this mark a step ends as soon as no value is paged.

    Args:
        fixed_order: True if all such steps run the same layers forward and backward in the same
            order, which ebb records in the first step. Then a layer whose backward directly
            follows its forward is not paged, and on accelerators pages are restored ahead, while
            another layer runs its backward. For pipelines, name stages and micro-batches with
            :func:`microbatch`.

    Raises:
        RuntimeError: the order of the step differs from the recorded one. The message names both
            entries, and ebb records the next step. Or a step is already open.

    Examples:
        >>> x, n = torch.randn(8, 4, requires_grad=True), torch.tensor(3)
        >>> policy = ebb.Policy({"aten::mul": ebb.PAGE})
        >>> with ebb.experimental.paging.step():
        ...     with ebb.region(policy):
        ...         h = ebb.experimental.mark_rows(x.clone(), n)
        ...         y = (h * 2).sin()[:3].sum()
        ...     y.backward()
        >>> ebb.experimental.paging.step_ok()
        True
    """
    with bracket(fixed_order, raises_late=False):
        yield


@contextlib.contextmanager
def bracket(fixed_order: bool, raises_late: bool) -> Iterator[None]:
    """Brackets a step. `raises_late`: an overflow raises only at the end of the step."""
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

    Without microbatch the stage is 0, and ebb counts the micro-batches of each region. Only the
    forward needs it.

    Args:
        index: of the micro-batch, from 0; ``None``: ebb counts.
        stage: of the pipeline, from 0, such as the virtual stage of an interleaved schedule.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is negative or too large.
    """
    for name, number in (("stage", stage), ("index", 0 if index is None else index)):
        whole_number(name, number, most=2**31 - 1)
    before = _C.exchange_paging_place(stage, -1 if index is None else index)
    try:
        yield
    finally:
        _C.exchange_paging_place(*before)


def step_ok(group: Any = None) -> bool:
    """Return True if the step's gradients are valid: each page pool was large enough.

    Call step_ok before the optimizer; in a distributed job, on every process of the group. It waits
    for the pools' work on each device, not for later work; if a CUDA graph uses a pool, also for
    the current stream. If step_ok returns False, clear the gradients and run the step again. That
    run uses no pools, and ebb then allocates larger ones. Call step_ok once for each optimizer
    step: the result is reset when a value is paged again. A ``torch.optim`` optimizer that is about
    to use invalid gradients raises :class:`PageOverflowError`.

    Args:
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            They agree through the group's store, as in :func:`run_step`.

    Raises:
        RuntimeError: paging failed in another way: a count of rows is invalid. Or a CUDA graph is
            being captured, so the host must not wait: see :func:`found_inf`. Or other processes do
            not arrive within the time limit of the process group.
        PageOverflowError: paging failed in another way in another process; or step_ok is called in
            :func:`run_step`, and the step cannot be run again.
        NotImplementedError: the process group has several ranks and no store (MPI).
    """
    attempt = of_this_thread()
    if attempt is not None and attempt.agreement.is_of(group):
        return attempt.agreement.ask(_C.paging_step_ok)
    return Agreement(group).ask(_C.paging_step_ok, at_end=True)


def found_inf(device: torch.device | str) -> torch.Tensor:
    """Return a flag on the device with the result of :func:`step_ok`, without waiting.

    For CUDA graphs that capture the whole step with its optimizer. Assign the flag to
    ``optimizer.found_inf`` of a fused or capturable optimizer, which then skips the update, as for
    ``GradScaler``. The flag covers this process only: in a distributed job reduce it over the ranks
    (``ReduceOp.MAX``).

    Args:
        device: the device of the pools.

    Returns:
        A 0-dimensional float32 tensor: 1.0 if the gradients are invalid, else 0.0.
    """
    return _C.paging_found_inf(torch.device(device))


def reset() -> None:
    """Drop all pools and the recorded step. ebb records the next step again.

    Tensors that are paged now are still restored. Delete CUDA graphs that use a pool first.

    Raises:
        RuntimeError: a :func:`step` is open.
    """
    _C.paging_reset()

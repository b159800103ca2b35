"""Running a step, and running it again if it found too little room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ebb import _C
from ebb.paging._before import Before, gradients_kept
from ebb.paging._overflow import PageOverflowError
from ebb.paging._steps import all_ok, step, step_ok

T = TypeVar("T")


def run_step(
    function: Callable[[], T],
    *,
    again: Callable[[], T] | None = None,
    state: Iterable[torch.nn.Module | torch.Tensor] = (),
    fixed_order: bool = False,
    group: Any = None,
) -> T:
    """Run a training step; if a page pool had too little room, run it once more without pools.

    Before the second run torch's random states, and the gradients of all leaves that a backward of
    the first run reached, are put back as they were, so gradients are those of one run. Larger
    pools are made after it.

    Args:
        function: runs the step's forwards and backwards. It may run the optimizer, last: one that
            is about to use bad gradients raises, and the step runs again. Whatever else it changes,
            it must be able to change twice, or ``state`` must name it. Threads in which it runs
            backwards are the one that calls, and those that such a thread starts; what a thread
            that existed before computes (a worker of a pool) is taken for somebody else's.
        again: called instead of ``function`` the second time: where ``function`` replays a CUDA
            graph, a function that runs the same step eagerly.
        state: modules and tensors that are put back as well: the buffers of modules (running
            statistics), and gradients that no backward of torch adds to (FSDP2's).
        fixed_order: as in :func:`step`.
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            Each must call.

    Returns:
        What ``function`` returned, of the run that counts.

    Raises:
        PageOverflowError: there was too little room the second time too.
        RuntimeError: a count of rows cannot be; see :func:`step_ok`.

    Example:
        >>> net = torch.nn.Linear(4, 4)
        >>> ebb.paging.run_step(lambda: net(torch.ones(2, 4)).sum().backward())
    """
    before = Before(state)
    failed: Exception | None = None
    try:
        with step(fixed_order), gradients_kept(before):
            result = function()
    except Exception as error:
        failed = error
    if all_ok(group, its_own=failed is not None and _C.paging_errors() == 0):
        if failed is not None:
            raise failed
        return result
    del failed
    before.put_back()
    _C.paging_record_next()
    with step(fixed_order):
        result = (again or function)()
    if not step_ok(group):
        raise PageOverflowError(
            "ebb: a page pool had too little room in the second run of a step too. If the step is "
            "a CUDA graph's replay, give run_step an eager function as `again`."
        )
    return result

"""Running a step, and running it again if it found too little room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ebb import _C
from ebb.paging._before import Before, gradients_kept
from ebb.paging._mark_rows import runs_again
from ebb.paging._overflow import PageOverflowError
from ebb.paging._steps import all_ok, step, step_ok

T = TypeVar("T")

runs: Counter[bool] = Counter()  # of steps that can be run again, by whether their order is fixed


def _check_what_came_before() -> None:
    """Gradients that are of no use, of a backward outside of such steps, would not be put right by
    running this one again."""
    errors = _C.paging_errors()
    if errors and not _C.paging_was_told():
        raise PageOverflowError(
            f"ebb: paging failed in a backward that ran before this step, outside of "
            f"ebb.paging.run_step(): {_C.describe_page_errors(errors)}. Its gradients are of no "
            "use. Let run_step() run all that adds to them, or ask ebb.paging.step_ok() before, "
            "and clear the gradients if they are not."
        )


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
        PageOverflowError: there was too little room the second time too; or in a backward that ran
            before, and nobody has been told.
        RuntimeError: a count of rows cannot be; see :func:`step_ok`.

    Example:
        >>> net = torch.nn.Linear(4, 4)
        >>> ebb.paging.run_step(lambda: net(torch.ones(2, 4)).sum().backward())
    """
    _check_what_came_before()
    runs[fixed_order] += 1
    before = Before(state)
    failed: Exception | None = None
    try:
        try:
            with step(fixed_order), gradients_kept(before), runs_again():
                result = function()
        except Exception as error:
            failed = error
        if all_ok(group, its_own=failed is not None and _C.paging_errors() == 0):
            if failed is not None:
                raise failed
            return result
    finally:
        del failed  # whose traceback holds this frame, and so all of the step
    before.put_back()
    _C.paging_record_next()
    with step(fixed_order), runs_again():
        result = (again or function)()
    if not step_ok(group):
        raise PageOverflowError(
            "ebb: a page pool had too little room in the second run of a step too. If the step is "
            "a CUDA graph's replay, give run_step an eager function as `again`."
        )
    return result

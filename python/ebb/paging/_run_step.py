"""Running a step, and running it again if it found too little room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from ebb import _C
from ebb.paging._agreement import Agreement
from ebb.paging._attempt import Attempt, going_on
from ebb.paging._before import Before
from ebb.paging._optimizers import guard_optimizers
from ebb.paging._overflow import PageOverflowError
from ebb.paging._steps import bracket

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

    In a distributed job all processes of ``group`` run the step again if one of them must. They
    agree before the first optimizer of the run steps (or ``GradScaler.unscale_``), and when the
    function has returned: each waits for all others there. They agree through the store of the
    process group, so ``run_step`` sends nothing that a collective of the program could meet. Until
    they agree nothing is raised for a pool with too little room, ``overflow="blocking"`` included,
    so all processes come to the same collectives. A process whose function raises passes its error
    on at once; the others go on, as in eager.

    Args:
        function: runs the step's forwards and backwards. It may run optimizers, last: the first
            one raises if gradients are bad in any process, and the step runs again. An overflow
            that comes after an optimizer has stepped raises, since the step cannot be run again.
            No collective may follow the optimizers. Whatever else it changes,
            it must be able to change twice, or ``state`` must name it. Threads in which it runs
            backwards are the one that calls, and those that such a thread starts; what a thread
            that existed before computes (a worker of a pool) is taken for somebody else's.
        again: called instead of ``function`` the second time: where ``function`` replays a CUDA
            graph, a function that runs the same step eagerly.
        state: modules and tensors that are put back as well: the buffers of modules (running
            statistics), and gradients that no backward of torch adds to (FSDP2's).
        fixed_order: as in :func:`step`.
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            Each must call, and those with which the step has collectives must be among them.

    Returns:
        What ``function`` returned, of the run that counts.

    Raises:
        PageOverflowError: a pool had too little room in the second run too; or it had too little in
            an earlier backward, and the program was not told; or the step cannot be run again,
            because an optimizer has used the gradients, or because one of several processes raised
            half way. Every process of the group raises this, except those that raise an error of
            their own.
        RuntimeError: a count of rows cannot be; see :func:`step_ok`. Or other processes have not
            come within the time limit of the process group.
        NotImplementedError: the process group has no store (MPI).

    Example:
        >>> net = torch.nn.Linear(4, 4)
        >>> ebb.paging.run_step(lambda: net(torch.ones(2, 4)).sum().backward())
    """
    guard_optimizers()
    runs[fixed_order] += 1
    agreement = Agreement(group)
    with agreement.leaving_on_error():
        _check_what_came_before()
        before = Before(state)
    is_good, result = _run(function, fixed_order, Attempt(agreement, before))
    if is_good:
        return cast(T, result)
    agreement = Agreement(group)
    with agreement.leaving_on_error():
        before.put_back()
    _C.paging_record_next()
    is_good, result = _run(again or function, fixed_order, Attempt(agreement, None))
    if not is_good:
        raise PageOverflowError(
            "ebb: a page pool had too little room in the second run of a step too. If the step is "
            "a CUDA graph's replay, give run_step an eager function as `again`."
        )
    return cast(T, result)


def _run(function: Callable[[], T], fixed_order: bool, attempt: Attempt) -> tuple[bool, T | None]:
    """Whether the run was good in all processes, and what the function returned."""
    agreement = attempt.agreement
    try:
        # With several processes nothing is raised half way: others may wait in a collective, and
        # the step could not be run again.
        with bracket(fixed_order, raises_late=not agreement.is_alone), going_on(attempt):
            result = function()
    except Exception as error:
        if not agreement.runs_again_after(error):
            raise
        return False, None
    except BaseException:
        agreement.leave()
        raise
    return agreement.ask(_C.paging_step_ok, at_end=True), result

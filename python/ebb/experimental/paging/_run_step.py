"""Runs a training step, and runs it again if a page pool was too small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from ebb import _C
from ebb.experimental.paging._agreement import Agreement, PageOverflowError
from ebb.experimental.paging._attempt import Attempt, Before, going_on
from ebb.experimental.paging._optimizers import guard_optimizers
from ebb.experimental.paging._steps import bracket

T = TypeVar("T")

runs: Counter[bool] = Counter()  # calls of run_step; key: fixed_order


def _check_what_came_before() -> None:
    """Raises if a backward before this step left invalid gradients, which a second run of this step
    would not repair."""
    errors, untold = _C.paging_errors()
    if untold:
        raise PageOverflowError(
            "ebb: paging failed in a backward that ran before this step, outside of "
            "ebb.experimental.paging.run_step(), so its gradients are invalid: "
            f"{_C.describe_page_errors(errors)}. Run every backward that accumulates into them "
            "inside run_step(), or call paging.step_ok() after that backward and clear the "
            "gradients if it returns False."
        )


def run_step(
    function: Callable[[], T],
    *,
    again: Callable[[], T] | None = None,
    state: Iterable[torch.nn.Module | torch.Tensor] = (),
    fixed_order: bool = False,
    group: Any = None,
) -> T:
    """Run a training step. If a page pool was too small, run the step once more without pools.

    Before the second run, run_step restores torch's random states and the gradients of all leaves
    that a backward of the first run reached. The gradients are thus those of one run. After the
    second run ebb allocates larger pools.

    In a distributed job all processes of ``group`` run the step again if one of them must. They
    agree before the run's first optimizer step (or ``GradScaler.unscale_``), and after the function
    returns. Each process waits for all others there. They agree through the store of the
    process group, so ``run_step`` cannot interfere with the program's collectives. Until they
    agree, no overflow raises, not even with ``overflow="blocking"``, so all processes reach the
    same collectives. If the function raises in one process, that process raises its error at once;
    the others continue, as in eager.

    Args:
        function: runs the step's forwards and backwards. It may end with optimizer steps: the first
            one raises if gradients are invalid in any process, and the step runs again. An overflow
            after an optimizer has stepped raises, because the step cannot be run again. No
            collective may follow the optimizers. All other state that the function changes must
            tolerate a second change, or ``state`` must name it. The function may run backwards in
            the calling thread and in threads that such a thread starts. ebb ignores backwards in
            threads that existed before, such as a worker of a thread pool.
        again: called instead of ``function`` in the second run. If ``function`` replays a CUDA
            graph, pass a function that runs the same step eagerly.
        state: modules and tensors to restore as well: the buffers of modules (running statistics),
            and gradients to which no backward of torch adds (FSDP2's).
        fixed_order: as in :func:`step`.
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            Each of them must call run_step. The group must include all processes with which the
            step has collectives.

    Returns:
        The result of ``function`` in the valid run.

    Raises:
        PageOverflowError: a pool was too small in the second run too; or in an earlier backward,
            after which the program did not call :func:`step_ok`; or the step cannot be run again,
            because an optimizer has used the gradients or the function raised in one of several
            processes. Every process of the group raises this, except those that raise an error of
            their own.
        RuntimeError: a count of rows is invalid; see :func:`step_ok`. Or other processes have not
            arrived within the time limit of the process group.
        NotImplementedError: the process group has no store (MPI).

    Examples:
        >>> net = torch.nn.Linear(4, 4)
        >>> ebb.experimental.paging.run_step(lambda: net(torch.ones(2, 4)).sum().backward())
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
            "ebb: a page pool was too small in the second run of the step, too. If the function "
            "replays a CUDA graph, pass again=, a function that runs the same step without it."
        )
    return cast(T, result)


def _run(function: Callable[[], T], fixed_order: bool, attempt: Attempt) -> tuple[bool, T | None]:
    """Returns True if the run was valid in all processes, and the function's result."""
    agreement = attempt.agreement
    try:
        # With several processes an overflow raises only at the end. Other processes may wait in a
        # collective, and the step could not be run again.
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

"""Valid rows; steps: their bounds and micro-batches, a second run if a page pool was too small, and
the check that they were valid."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._support.sizes import whole_number
from ebb._support.subclasses import plain_tensors
from ebb.experimental.paging._agreement import Agreement, PageOverflowError
from ebb.experimental.paging._attempt import (
    Attempt,
    Before,
    going_on,
    guard_optimizers,
    is_any,
    of_this_thread,
)

T = TypeVar("T")

runs: Counter[bool] = Counter()  # calls of run_step; key: fixed_order
# Calls of mark_rows with grad enabled; key: True inside run_step.
marks: Counter[bool] = Counter()


def mark_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mark the first rows of a tensor as valid and the others as padding, for ``ebb.PAGE``.

    The contents of padding rows must not affect the program's results: backward restores them as
    copies of a valid row. ``ebb.verify`` restores them as NaN, which reveals a program that depends
    on them.

    The mark follows the tensor through operators that keep rows apart: elementwise operators,
    products with ``x`` on the left, normalisations and reductions over dimensions other than the
    first. The result of an operator that may mix rows has no mark. The result also has no mark if
    the operator reads an unmarked tensor with as many rows: a residual, a mask, weights of tokens.
    Mark such tensors too if the same count applies to them. Without a mark the decision PAGE means
    SAVE, and ``bytes_not_paged`` in ``ebb.stats`` counts the bytes.

    Outside of regions and under ``torch.compile`` mark_rows does nothing.

    Args:
        x: of shape (rows, ...), with contiguous rows in a storage of its own. Mark ``x`` before
            other operators read it.
        rows: the number of valid rows, as one integer or as counts that sum to it (tokens per
            expert); of an integer dtype, on ``x``'s device. It may be overwritten afterwards.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``x`` is not contiguous or not a whole storage, ``rows`` is on another device,
            or, on the CPU, out of range. On other devices the host does not wait for the count;
            ``ebb.experimental.paging.step_ok`` reports an invalid one.

    Examples:
        >>> policy = ebb.Policy({"aten::mm": ebb.PAGE})
        >>> x, w = torch.randn(64, 8), torch.randn(8, 8, requires_grad=True)
        >>> with ebb.region(policy):
        ...     h = ebb.experimental.mark_rows(x.clone(), torch.tensor([3, 0, 5])) @ w
        ...     loss = h.relu()[:8].sum()
        >>> loss.backward()
    """
    if is_compiling():
        return x
    for name, value in (("x", x), ("rows", rows)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"ebb: mark_rows: {name} must be a tensor; got {type(value).__name__}")
    guard_optimizers()
    marks[is_any()] += torch.is_grad_enabled()
    for inner in plain_tensors(x):
        _C.mark_rows(inner, rows)
    return x


@contextlib.contextmanager
def step(fixed_order: bool = True) -> Iterator[None]:
    """Mark one training step: all its forwards and backwards.

    Optional: without this mark a step ends as soon as no value is paged.

    Args:
        fixed_order: True if all such steps run the same layers forward and backward in the same
            order, which ebb records in the first step. Then a layer whose backward directly
            follows its forward is not paged, and on accelerators pages are restored ahead, while
            another layer runs its backward. For pipelines, name stages and micro-batches with
            ``microbatch``.

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
    with _bracket(fixed_order, raises_late=False):
        yield


@contextlib.contextmanager
def _bracket(fixed_order: bool, raises_late: bool) -> Iterator[None]:
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


def _check_what_came_before() -> None:
    """Raises if an earlier backward left invalid gradients, which a second run would not repair."""
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
    that a backward of the first run reached. After the second run ebb allocates larger pools.

    In a distributed job all processes of ``group`` run the step again if one of them must. They
    agree through the store of the process group, not by a collective, before the run's first
    optimizer step (or ``GradScaler.unscale_``), and after the function returns; each process waits
    for all others there. Until they agree, no overflow raises, not even with
    ``overflow="blocking"``, so all processes reach the same collectives. If the function raises in
    one process, that process raises its error at once; the others continue, as in eager.

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
        fixed_order: as in ``step``.
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            Each of them must call run_step. The group must include all processes with which the
            step has collectives.

    Returns:
        The result of ``function`` in the valid run.

    Raises:
        PageOverflowError: a pool was too small in the second run too; or in an earlier backward,
            after which the program did not call ``step_ok``; or the step cannot be run again,
            because an optimizer has used the gradients or the function raised in one of several
            processes. Every process of the group raises this, except those that raise an error of
            their own.
        RuntimeError: a count of rows is invalid; see ``step_ok``. Or other processes have not
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
        with _bracket(fixed_order, raises_late=not agreement.is_alone), going_on(attempt):
            result = function()
    except Exception as error:
        if not agreement.runs_again_after(error):
            raise
        return False, None
    except BaseException:
        agreement.leave()
        raise
    return agreement.ask(_C.paging_step_ok, at_end=True), result


def step_ok(group: Any = None) -> bool:
    """Return True if the step's gradients are valid: each page pool was large enough.

    Call step_ok before the optimizer; in a distributed job, on every process of the group. It waits
    for the pools' work on each device, not for later work; if a CUDA graph uses a pool, also for
    the current stream. If step_ok returns False, clear the gradients and run the step again. That
    run uses no pools, and ebb then allocates larger ones. Call step_ok once for each optimizer
    step: the result is reset when a value is paged again. A ``torch.optim`` optimizer that is about
    to use invalid gradients raises ``PageOverflowError``.

    Args:
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.
            They agree through the group's store, as in ``run_step``.

    Raises:
        RuntimeError: paging failed in another way: a count of rows is invalid. Or a CUDA graph is
            being captured, so the host must not wait: see ``found_inf``. Or other processes do
            not arrive within the time limit of the process group.
        PageOverflowError: paging failed in another way in another process; or step_ok is called in
            ``run_step``, and the step cannot be run again.
        NotImplementedError: the process group has several ranks and no store (MPI).
    """
    attempt = of_this_thread()
    if attempt is not None and attempt.agreement.is_of(group):
        return attempt.agreement.ask(_C.paging_step_ok)
    return Agreement(group).ask(_C.paging_step_ok, at_end=True)


def found_inf(device: torch.device | str) -> torch.Tensor:
    """Return a flag on the device with the result of ``step_ok``, without waiting.

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
        RuntimeError: a ``step`` is open.
    """
    _C.paging_reset()

"""How values with the decision PAGE move to page pools and back.

A padded buffer, such as the input of an expert that may get all tokens or none, has rows that live
and rows that do not. With :func:`ebb.mark_rows` and the decision ``ebb.PAGE`` only the live rows
are kept for backward, in pages of a pool, though only the device knows how many they are.

>>> ebb.paging.configure(page_rows=64, headroom=1.2)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ebb import _C
from ebb._environment import configure_from
from ebb._sizes import Bytes, number_of_bytes, whole_number

__all__ = [
    "PageOverflowError",
    "configure",
    "found_inf",
    "microbatch",
    "reset",
    "run_step",
    "settings",
    "stats",
    "step",
    "step_ok",
]

T = TypeVar("T")

_MODES = ("deferred", "blocking", "assert")
_DEAD_ROWS = ("repeat", "zero", "nan", "none")
_NO_LIMIT = 2**64 - 1


class PageOverflowError(RuntimeError):
    """A page pool had no room for a tensor, so the gradients of this step are of no use.

    Raised in the step where ``overflow="blocking"``, and by an optimizer that is about to use such
    gradients. Clear them and run the step again, or let :func:`run_step` do so.
    """


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"ebb: {name} must be a number; got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"ebb: {name} is too large: {value!r}") from None


def _choice(name: str, value: object, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise ValueError(f"ebb: {name} must be one of {', '.join(choices)}; got {value!r}")
    return choices.index(value)


def configure(
    *,
    page_rows: int | None = None,
    headroom: float | None = None,
    host_headroom: float | None = None,
    device_limit: Bytes | None = None,
    overflow: str | None = None,
    dead_rows: str | None = None,
    prefetch: int | None = None,
) -> None:
    """Set how values with the decision PAGE move, for the whole process.

    What is not given stays as it is. Each setting can also be given by an environment variable,
    ``EBB_PAGING_PAGE_ROWS`` and so on, read when ebb is imported. Sizes hold for pools that are
    made from now on; :func:`reset` drops those that exist.

    Args:
        page_rows: rows of a page. Default 64.
        headroom: how much larger a pool is than what the recorded step needed, as a factor of at
            least 1. Default 1.1.
        host_headroom: the size of a pool's second tier, in pinned host memory that kernels address
            directly, as a factor of the same need; 0 for none, the default.
        device_limit: the most bytes that pools may have on one device, as a number or as text such
            as ``"4GiB"``; pools shrink in proportion. Default: no limit.
        overflow: what happens if a pool has no room. ``"deferred"``, the default: nobody waits, and
            :func:`step_ok` tells after the step. ``"blocking"``: the host waits for each tensor,
            and :class:`PageOverflowError` is raised where it happens. ``"assert"``: an assertion on
            the device.
        dead_rows: what rows that do not live come back as: ``"repeat"``, the default: copies of the
            first row that lives, which no operator finds harder to differentiate; ``"zero"``,
            ``"nan"``, or ``"none"``, whatever is in fresh memory. In verify mode
            (:func:`ebb.verify`, unless it demotes) it is NaN, so that a program which depends on
            them shows.
        prefetch: how many layers' pages come back ahead of backward, 0 or 1, in steps that
            :func:`step` brackets; -1, the default: 1 on accelerators, 0 on the CPU.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range.
    """
    changed: dict[str, Any] = {}
    if page_rows is not None:
        changed["page_rows"] = whole_number("page_rows", page_rows, "rows")
    if headroom is not None:
        changed["headroom"] = _number("headroom", headroom)
    if host_headroom is not None:
        changed["host_headroom"] = _number("host_headroom", host_headroom)
    if device_limit is not None:
        changed["device_limit"] = number_of_bytes("device_limit", device_limit)
    if overflow is not None:
        changed["overflow"] = _choice("overflow", overflow, _MODES)
    if dead_rows is not None:
        changed["dead_rows"] = _choice("dead_rows", dead_rows, _DEAD_ROWS)
    if prefetch is not None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int):
            raise TypeError(f"ebb: prefetch must be an int; got {prefetch!r}")
        if prefetch not in (-1, 0, 1):
            raise ValueError(f"ebb: prefetch must be 0, 1 or -1; got {prefetch}")
        changed["prefetch"] = prefetch
    _C.configure_paging(_C.paging_settings() | changed)


def settings() -> dict[str, Any]:
    """The settings of :func:`configure`, by name; sizes in bytes, ``None`` for no limit."""
    found = _C.paging_settings()
    limit = found["device_limit"]
    return found | {
        "overflow": _MODES[found["overflow"]],
        "dead_rows": _DEAD_ROWS[found["dead_rows"]],
        "device_limit": None if limit == _NO_LIMIT else limit,
    }


def stats() -> dict[str, Any]:
    """What the paging engine did since the process began, and what it has now.

    Returns:
        A dictionary with

        * ``steps``; ``recorded_steps``: those that ran without pools, with the host waiting for
          each count; ``overflows``: steps that found too little room; ``spilled_steps``: how often
          :func:`step_ok` found rows in the second tier;
        * ``stashed``: values; ``resident``: those of them that stayed where they were, since their
          backward came next; ``stashes``: values that are away now;
        * ``padded_bytes``, ``live_bytes``: the most that the recorded step had away at a time, with
          and without dead rows;
        * ``pool_bytes``, ``host_pool_bytes``: what pools have now, on devices and in pinned memory;
        * ``pools``: each pool's ``device``, ``dtype``, ``row_bytes``, ``page_rows``,
          ``device_pages``, ``host_pages``, ``stack`` (rows come back in the reverse order, so no
          table of pages is needed) and ``bytes``;
        * ``schedule``: the entries of the step that :func:`step` recorded, in words.
    """
    return _C.paging_stats()


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
    _C.paging_step_begins(fixed_order)
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


def _all_ok(group: Any, its_own: bool = False) -> bool:
    """Whether the step was good in all processes of the group. `its_own`: here something else went
    wrong, so that it does not matter."""
    failed: Exception | None = None
    try:
        ok = its_own or _C.paging_step_ok()
    except RuntimeError as error:
        failed, ok = error, False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        backend = torch.distributed.get_backend(group)
        device = torch.device("cpu")
        if backend not in ("gloo", "mpi"):
            device = torch.accelerator.current_accelerator() or device
        flag = torch.tensor(int(ok), device=device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group)
        ok = bool(flag.item())
    if failed is not None:
        raise failed
    return ok


def step_ok(group: Any = None) -> bool:
    """Whether the gradients of the step are good: each page pool had room. Call it before the
    optimizer; in a distributed job, on every process of the group.

    Waits until the device has done what was given to the pools, and for nothing else. If the answer
    is False clear the gradients and run the step again: the next step runs without pools, and
    larger ones are made after it. Ask once for each step of the optimizer: the answer is forgotten
    when something is paged again. An optimizer of ``torch.optim`` that is about to use the
    gradients of such a step raises :class:`PageOverflowError`.

    Args:
        group: the processes that must agree, if ``torch.distributed`` is initialised; default: all.

    Raises:
        RuntimeError: something else went wrong with the pages: a count of rows that cannot be.
    """
    return _all_ok(group)


def found_inf(device: torch.device | str) -> torch.Tensor:
    """A flag on the device that says the same as :func:`step_ok`, for which nobody waits.

    For steps that are captured whole, optimizer included: assign it to ``optimizer.found_inf`` of a
    fused or capturable optimizer, which then leaves parameters alone, as for ``GradScaler``.

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


class _Before:
    """What running a step again must find as it was: random states, gradients, and buffers."""

    def __init__(self, state: Iterable[torch.nn.Module | torch.Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        accelerator = torch.accelerator.current_accelerator()
        self._device: Any = None
        if accelerator is not None and accelerator.type != "cpu":
            self._device = torch.get_device_module(accelerator)
            self._states = self._device.get_rng_state_all()
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None, Any]] = {}
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in state:
            if isinstance(part, torch.nn.Module):
                self._written += [(buffer, buffer.clone()) for buffer in part.buffers()]
                self.keep_gradients(part.parameters())
            elif isinstance(part, torch.Tensor):
                self._written.append((part, part.detach().clone()))
            else:
                raise TypeError(f"ebb: state takes modules and tensors; got {type(part).__name__}")

    def keep_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._gradients and (tensor.is_leaf or tensor.retains_grad):
                grad = tensor.grad
                copy = None if grad is None else grad.detach().clone()
                self._gradients[id(tensor)] = (tensor, grad, copy)

    @torch.no_grad()
    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            self._device.set_rng_state_all(self._states)
        for leaf, grad, copy in self._gradients.values():
            leaf.grad = grad
            if grad is not None:
                grad.copy_(copy)
        for tensor, copy in self._written:
            tensor.copy_(copy)


_before: _Before | None = None  # of the step that run_step runs for the first time
_run_backward: Any = None  # torch's, once run_step has been called


def _leaves_behind(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Whose ``grad`` a backward from these tensors or gradient edges would add to."""
    yield from _C.leaves_behind([root for root in roots if isinstance(root, torch.Tensor)])
    todo = [root.node for root in roots if not isinstance(root, torch.Tensor)]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= following
        todo += following


def _keep_gradients_and_run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if _before is not None and kwargs.get("accumulate_grad", True):
        inputs = args[3] if len(args) > 3 and args[3] else ()
        _before.keep_gradients(_leaves_behind(outputs))
        _before.keep_gradients(x for x in inputs if isinstance(x, torch.Tensor))
    return _run_backward(outputs, *args, **kwargs)


@contextlib.contextmanager
def _gradients_kept(before: _Before) -> Iterator[None]:
    """Inside, gradients are copied before a backward adds to them. One at a time: see step()."""
    global _before, _run_backward
    autograd: Any = torch.autograd
    if _run_backward is None:
        _run_backward = autograd._engine_run_backward
        autograd._engine_run_backward = _keep_gradients_and_run
    _before = before
    try:
        yield
    finally:
        _before = None


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
            it must be able to change twice, or ``state`` must name it.
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
    before = _Before(state)
    failed: Exception | None = None
    try:
        with step(fixed_order), _gradients_kept(before):
            result = function()
    except Exception as error:
        failed = error
    if _all_ok(group, its_own=failed is not None and _C.paging_errors() == 0):
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


def _check_gradients(optimizer: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # see found_inf
    errors = _C.paging_errors()
    if not errors or (_C.paging_was_told() and _are_finite(optimizer)):
        return
    with contextlib.suppress(RuntimeError):
        _C.paging_step_ok()  # the next step is recorded
    raise PageOverflowError(
        f"ebb: an optimizer is about to use the gradients of a step in which paging failed: "
        f"{_C.describe_page_errors(errors)}. They are of no use. Ask ebb.paging.step_ok() before "
        f"the optimizer, clear the gradients and run the step again, or let "
        f"ebb.paging.run_step() do all of it."
    )


def _are_finite(optimizer: Any) -> bool:
    """Of an optimizer that is run though the user knows: it may be another model's."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads)


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Checks at once, or, where a closure computes the gradients, after it."""
    closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
    if closure is None:
        _check_gradients(optimizer)
        return None

    def checked() -> Any:
        loss = closure()
        _check_gradients(optimizer)
        return loss

    given = tuple(checked if value is closure else value for value in args[1:])
    named = {name: checked if value is closure else value for name, value in kwargs.items()}
    return (args[0], *given), named


def guard_optimizers() -> None:
    """From now on optimizers refuse gradients that are of no use. For policies with PAGE."""
    global _guard
    if _guard is None:
        _guard = register_optimizer_step_pre_hook(_before_optimizer)


_guard: Any = None


def _parse(name: str, text: str) -> Any:
    if name in ("page_rows", "prefetch"):
        return int(text)
    return float(text) if name in ("headroom", "host_headroom") else text


configure_from("EBB_PAGING_", _C.paging_settings(), _parse, configure)

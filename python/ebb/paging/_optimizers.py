"""Optimizers refuse the gradients of a step that found too little room."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ebb import _C
from ebb.paging._overflow import PageOverflowError


def _check_gradients(optimizer: Any) -> None:
    errors = _C.paging_errors()  # none while a graph is captured: see found_inf
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

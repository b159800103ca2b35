"""Makes optimizers refuse the invalid gradients of a step with an overflow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ebb import _C
from ebb.experimental.paging._agreement import USED, PageOverflowError
from ebb.experimental.paging._attempt import of_this_thread


def _has_no_errors() -> bool:
    # paging_step_ok() alone would raise during graph capture, when new errors are not visible.
    return _C.paging_errors()[0] == 0 or _C.paging_step_ok()


def _check_gradients(optimizer: Any) -> None:
    """Raises if gradients are invalid that an optimizer or a scaler is about to use."""
    attempt = of_this_thread()
    if attempt is not None and (attempt.agreement.refusal or not attempt.agreement.used):
        if not attempt.agreement.ask(_has_no_errors):
            raise PageOverflowError(attempt.agreement.refusal)
        return
    errors, untold = _C.paging_errors()  # lacks new errors during graph capture: see found_inf
    if not errors or (not untold and _are_finite(optimizer)):
        return
    with contextlib.suppress(RuntimeError):
        _C.paging_step_ok()  # makes ebb record the next step
    advice = (
        "Call paging.step_ok() before the optimizer, and if it returns False, clear the "
        "gradients and run the step again; ebb.experimental.paging.run_step() does all of this."
    )
    raise PageOverflowError(
        f"ebb: an optimizer is about to use invalid gradients, because paging failed in this step: "
        f"{_C.describe_page_errors(errors)}. "
        f"{advice if attempt is None else USED}"
    )


def _are_finite(optimizer: Any) -> bool:
    """True if the optimizer's gradients are finite. After ebb has reported the error, an optimizer
    with finite gradients may step, because it may belong to another model."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads)


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Checks the gradients before an optimizer steps: at once, or after its closure ran."""
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


def _checking_first(unscale: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(unscale)
    def checked(scaler: Any, optimizer: Any) -> None:
        _check_gradients(optimizer)
        unscale(scaler, optimizer)

    checked.checks_first = True  # type: ignore[attr-defined]
    return checked


def _scalers(scaler: type[Any] = torch.amp.GradScaler) -> Iterator[type[Any]]:
    yield scaler
    for derived in scaler.__subclasses__():
        yield from _scalers(derived)


def guard_optimizers() -> None:
    """Make optimizers refuse invalid gradients from now on, for policies with PAGE. Gradient
    scalers refuse them too; otherwise they would skip the optimizer's step and lower the scale."""
    global _guard
    if _guard is None:
        _guard = register_optimizer_step_pre_hook(_before_optimizer)
    for scaler in _scalers():
        unscale = vars(scaler).get("unscale_")
        if unscale is not None and not hasattr(unscale, "checks_first"):
            scaler.unscale_ = _checking_first(unscale)


_guard: Any = None

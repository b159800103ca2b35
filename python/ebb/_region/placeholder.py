"""Tensors whose memory is freed after the forward and restored in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ebb import _C
from ebb._region.tracing import is_traced

_MARK = "_ebb_placeholder"


class PlaceholderError(RuntimeError):
    """A discarded tensor was read before backward restored it. The message names the op, the region
    and the remedy.

    For other tensors on the same memory (views) torch raises a ``RuntimeError`` with the same
    message.
    """

    __module__ = "ebb.experimental"  # the name for users and pickles


class _Discarded(torch.Tensor):
    """The class of a discarded tensor until its memory is restored."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "was read after discard() freed it" in str(error):
                raise PlaceholderError(str(error)) from None
            raise


def discardable(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a result of a region, inside it, so that ``discard`` can free its memory.

    Args:
        tensor: computed in the region, with the decision RECOMPUTE.

    Returns:
        ``tensor``. Where regions are disabled, discard does nothing with it.

    Raises:
        TypeError: ``tensor`` is not a tensor.
        ValueError: no region is open on this thread, or the region does not recompute the tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"ebb: ebb.experimental.discardable needs a tensor; got {type(tensor).__name__}"
        )
    if not is_traced():
        disabled = _C.regions_are_disabled()
        setattr(tensor, _MARK, None if disabled else _C.Placeholder(tensor))
    return tensor


def discard(tensor: torch.Tensor, *, restore_at: torch.Tensor) -> None:
    """Free a tensor's memory now; backward restores the data on reaching ``restore_at``.

    Use discard for a tensor that a region computes and that functions outside of the region save.
    Those functions keep its storage, so recomputation by the region alone frees nothing. discard
    empties the storage. Backward fills the storage again without a copy, so all views show the data
    again. A read before that raises ``PlaceholderError``, which names the op, the region
    and the remedy. The idea is from Megatron-LM's ``CheckpointWithoutOutput``. Under tracing
    discard does nothing.

    Args:
        tensor: marked by ``ebb.experimental.discardable`` inside its region, or returned by
            ``ebb.checkpoint(..., discard_output=True)``, and not written after that.
        restore_at: a tensor that requires grad and depends on all readers of ``tensor``, such as
            the result of the last function that read it. Backward reaches ``restore_at`` before
            those readers.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: ``tensor`` is not marked, or was written after the mark; or ``restore_at`` does
            not require grad.

    Examples:
        >>> x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
        >>> with ebb.region():
        ...     y = ebb.experimental.discardable(x.tanh())
        >>> z = y @ w
        >>> ebb.experimental.discard(y, restore_at=z)
        >>> z.sum().backward()
    """
    for name, given in (("tensor", tensor), ("restore_at", restore_at)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"ebb: {name} must be a tensor; got {type(given).__name__}")
    if is_traced():
        return
    if not hasattr(tensor, _MARK):
        raise ValueError(
            "ebb: discard needs a tensor that discardable() marked inside its region, or that "
            "ebb.checkpoint(..., discard_output=True) returned"
        )
    if not restore_at.requires_grad:
        raise ValueError(
            "ebb: restore_at must require grad; otherwise backward does not reach it and never "
            "restores the tensor"
        )
    placeholder = getattr(tensor, _MARK)
    if placeholder is None:  # regions were disabled
        return
    placeholder.discard(tensor)
    delattr(tensor, _MARK)
    owner = weakref.ref(tensor)
    if type(tensor) is torch.Tensor:
        tensor.__class__ = _Discarded

    def refill(_gradient: torch.Tensor) -> None:
        discarded = owner()
        if type(discarded) is _Discarded:
            discarded.__class__ = torch.Tensor  # type: ignore[assignment]
        placeholder.refill()

    restore_at.register_hook(refill)  # type: ignore[no-untyped-call]

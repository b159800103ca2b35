"""Marking writes that torch does not see."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._support import subclasses


def _plain(tensor: object) -> list[torch.Tensor]:
    """The tensor itself, or the inner tensors of a wrapper subclass."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"ebb: opaque takes tensors; got {type(tensor).__name__}")
    parts = subclasses.flatten(tensor)
    if parts is None:
        return [tensor]
    return [plain for part in parts[0] for plain in _plain(part)]


class opaque(_C.OpaqueWrites):
    """Marks writes to tensors by code that torch does not see, such as a raw kernel.

    Code that bypasses torch (ctypes, numpy, pybind, raw Triton) can write into a tensor that was
    computed in a region. Run again, the op that computed it would not give what was written. Put
    the write in this context manager: what the tensors hold at its end is kept, as an input would
    be. It is not needed for the results of ``torch.empty``, nor for those of ``zeros``, ``ones``
    and ``full`` that are written before torch reads them. :class:`ebb.verify` finds writes that
    need it.

    Where an earlier region, or one that has ended, may need what a tensor held, its version is
    moved as by an in-place op, so that a backward that needs the old contents raises.

    Args:
        tensors: those that are written; views of them are covered.

    Raises:
        TypeError: an argument is no tensor.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> with ebb.region():
        ...     h = x * 2
        ...     with ebb.opaque(h):
        ...         _ = h.detach().numpy().fill(5)
        ...     loss = h.sin().sum()
        >>> loss.backward()
    """

    __slots__ = ()

    def __init__(self, *tensors: torch.Tensor) -> None:
        if not is_compiling():
            self._configure(*[plain for tensor in tensors for plain in _plain(tensor)])

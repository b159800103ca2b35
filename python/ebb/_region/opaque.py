"""Marks writes that torch does not see."""

from __future__ import annotations

import warnings

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._support.subclasses import plain_tensors


class opaque(_C.OpaqueWrites):
    """Marks writes to tensors by code that torch does not see, such as a raw kernel.

    Code that bypasses torch (ctypes, numpy, pybind, raw Triton) can write into a tensor that was
    computed in a region. A replay of the op that computed the tensor would lose the written data.
    Put the write in this context manager. When the context ends, ebb saves the tensors' contents,
    as it saves an input. The results of ``torch.empty`` do not need it, nor do those of ``zeros``,
    ``ones`` and ``full`` if they are written before torch reads them. :class:`ebb.verify` finds
    writes that need it.

    If an earlier region may need a tensor's old contents, opaque increments the tensor's version as
    an in-place op does. If backward needs the old contents, it then raises.

    Args:
        tensors: the tensors that are written; their views are covered.

    Raises:
        TypeError: an argument is not a tensor.

    Examples:
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
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"ebb: opaque takes tensors; got {type(tensor).__name__}")
        if not is_compiling():
            self._configure(*[plain for tensor in tensors for plain in plain_tensors(tensor)])

    def __del__(self) -> None:
        if self._is_unused():
            warnings.warn(
                "ebb: ebb.opaque(...) was called without `with`, so it marked no write. Put the "
                "write into a block: `with ebb.opaque(tensor):`",
                RuntimeWarning,
                stacklevel=2,
            )

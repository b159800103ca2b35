"""Writes that are no operators: those that the program marks, and those of methods of torch.

Tensor.apply_ and similar methods loop over memory themselves, so a region would not see the write.
ebb treats each as ebb.opaque. The collectives of a backend (ProcessGroupGloo, the result of
``_get_backend``) also run without operators, unlike those of a process group. ebb treats both
alike.
"""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from ebb import _C
from ebb._support.subclasses import plain_tensors

# Collectives write to their first argument, whatever its name. Arguments that are read are named
# input_*.
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
)

_MARK = "_ebb_sees"  # attribute of methods that ebb has wrapped; functools.wraps copies it


class opaque(_C.OpaqueWrites):
    """Marks writes to tensors by code that torch does not see, such as a raw kernel.

    Code that bypasses torch (ctypes, numpy, pybind, raw Triton) can write into a tensor that was
    computed in a region. A replay of the op that computed the tensor would lose the written data.
    Put the write in this context manager. When the context ends, ebb saves the tensors' contents,
    as it saves an input. The results of ``torch.empty`` do not need it, nor do those of ``zeros``,
    ``ones`` and ``full`` if they are written before torch reads them. ``ebb.verify`` finds
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


def _announced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that writes to the storages among its arguments, self included."""

    @functools.wraps(method)
    def announced(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():  # without the user's dispatch modes
            written = [
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for storage in args
                if isinstance(storage, torch.UntypedStorage) and storage.device.type != "meta"
            ]
        with opaque(*written):
            return method(*args, **kwargs)

    return announced


def _slice_announced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps __getitem__: a slice is another storage on the same memory, and may be written."""
    sliced = _announced(method)

    @functools.wraps(method)
    def announced(self: torch.UntypedStorage, index: Any) -> Any:
        return (sliced if isinstance(index, slice) else method)(self, index)

    return announced


def _emptying(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if size == 0 and _C.in_region() and dist.is_available() and dist.is_initialized():
            _C.storage_emptied(self)
        return method(self, size)

    return resize_


def _before_collective(_backend: Any, *args: Any, **kwargs: Any) -> None:
    named = [value for name, value in kwargs.items() if not name.startswith("input")]
    for tensor in tree_leaves([args[:1], named]):
        if isinstance(tensor, torch.Tensor):
            _C.collective_writes(tensor)


def _watch_collectives() -> None:
    """Watches the methods of all process groups, also of those that exist already."""
    backend = torch._C._distributed_c10d.Backend
    replaced = [
        name
        for name in COLLECTIVES
        # pybind11 puts the C function into an instancemethod
        if not _C.watch(
            getattr(getattr(backend, name), "__func__", None),
            _C.Watch.COMMUNICATES,
            _before_collective,
        )
    ]
    if replaced:
        warnings.warn(
            f"ebb: other code has replaced {', '.join(replaced)} of torch.distributed's backends, "
            "so ebb does not see that these methods write to tensors. If you call them on a tensor "
            "of a region, use ebb.opaque(tensor).",
            stacklevel=2,
        )


# Methods of storages that ebb wraps. `_swap_data_ptr_` is new in torch 2.12.
_WRAPPERS = {
    "__getitem__": _slice_announced,
    "_byteswap": _announced,
    "_set_from_file": _announced,
    "_swap_data_ptr_": _announced,
    "resize_": _emptying,
}
_WRAPPED = tuple(filter(functools.partial(hasattr, torch.UntypedStorage), _WRAPPERS))
_NOW = vars(torch.UntypedStorage)  # follows all changes of the class
_methods = operator.itemgetter(*_WRAPPED)
_in_place: tuple[Any, ...] = ()  # the methods that `install` left in place
_lock = threading.Lock()  # held while methods are wrapped


def are_watched() -> bool:
    """True if ebb sees calls of these methods: ``install`` has run, and no other code has
    replaced a method since. Otherwise wrong gradients could go unnoticed."""
    try:
        are_ours: bool = _methods(_NOW) == _in_place
        return are_ours
    except KeyError:  # the class inherits a method that ebb has not wrapped
        return False


@functools.cache
def _watch_once() -> None:
    # A tensor's record_stream reaches the owner of memory that two storages share.
    _C.watch(torch._C.TensorBase.record_stream, _C.Watch.USES)
    for name in ("apply_", "map_", "map2_"):
        _C.watch(getattr(torch._C.TensorBase, name), _C.Watch.WRITES)
    if dist.is_available():
        _watch_collectives()


def install() -> None:
    """Starts to watch these methods. Called before a region, unless they are watched."""
    global _in_place
    with _lock:
        _watch_once()
        for name in _WRAPPED:
            method = getattr(torch.UntypedStorage, name)
            if not hasattr(method, _MARK):
                wrapped = _WRAPPERS[name](method)
                setattr(wrapped, _MARK, True)
                setattr(torch.UntypedStorage, name, wrapped)
        _in_place = _methods(_NOW)

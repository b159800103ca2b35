"""Methods of torch that write to memory without an operator.

Tensor.apply_ and similar methods loop over memory themselves, so a region would not see the write.
ebb treats each as ebb.opaque. The collectives of a backend (ProcessGroupGloo, the result of
``_get_backend``) also run without operators, unlike those of a process group. ebb treats both
alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ebb import _C
from ebb._region.opaque import opaque

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


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor on a storage, created without the user's dispatch modes."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _written(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The storages among a method's arguments, self included."""
    for argument in arguments:
        if isinstance(argument, torch.UntypedStorage) and argument.device.type != "meta":
            yield _bytes_of(argument)


def _announced(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def announced(*args: Any, **kwargs: Any) -> Any:
        with opaque(*_written(args)):
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
        if size == 0 and _C.in_region() and torch.distributed.is_initialized():
            _C.storage_emptied(self)
        return method(self, size)

    return resize_


def _communicating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def communicating(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = [value for name, value in kwargs.items() if not name.startswith("input")]
        for tensor in tree_leaves([args[:1], named]):
            if isinstance(tensor, torch.Tensor):
                _C.collective_writes(tensor)
        return _C.unseen(method, self, *args, **kwargs)

    return communicating


def install() -> None:
    if torch.distributed.is_available():
        backend = torch._C._distributed_c10d.Backend
        for name in COLLECTIVES:
            setattr(backend, name, _communicating(getattr(backend, name)))
        torch.UntypedStorage.resize_ = _emptying(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    for name in ("apply_", "map_", "map2_"):
        _C.watch(getattr(torch._C.TensorBase, name), _C.Watch.WRITES)
    # `_swap_data_ptr_` is new in torch 2.12.
    for name in {"_byteswap", "_set_from_file", "_swap_data_ptr_"} & set(dir(torch.UntypedStorage)):
        setattr(torch.UntypedStorage, name, _announced(getattr(torch.UntypedStorage, name)))
    whole = torch.UntypedStorage.__getitem__
    torch.UntypedStorage.__getitem__ = _slice_announced(whole)  # type: ignore[method-assign]

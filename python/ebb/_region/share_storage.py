"""Lets two tensors share memory without a copy."""

from __future__ import annotations

import functools

import torch

from ebb import _C


@functools.cache
def watch_uses() -> None:
    """Lets ``record_stream`` of a tensor with shared memory reach the memory's owner."""
    _C.watch(torch._C.TensorBase.record_stream, _C.Watch.USES)


def share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Let ``dst`` and every tensor on its storage use the memory of ``src``, without a copy.

    ``dst``'s old memory is freed, and no version counter changes. ``src`` may be freed first: the
    memory lives as long as either storage. A tensor whose storage was emptied (``resize_(0)``) to
    save memory can thus be filled again, with all its earlier views. The idea is from Megatron-LM's
    ``CheckpointWithoutOutput``.

    Args:
        dst: the tensor to fill. Its storage may be empty.
        src: has the data; same dtype, device, sizes, strides and storage offset as ``dst``. Its
            storage must be at least as large as ``dst``'s or, if ``dst``'s is empty, as the
            elements that ``dst`` shows. ``src`` cannot be resized from then on.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the tensors differ in one of these properties, are not plain strided tensors, or
            ``dst``'s storage is not resizable (numpy owns its memory, or it was ``src`` in an
            earlier call). The tensors are not changed.

    Examples:
        >>> a, b = torch.zeros(3), torch.ones(3)
        >>> view = a[1:]
        >>> _ = a.untyped_storage().resize_(0)
        >>> ebb.share_storage(a, b)
        >>> view
        tensor([1., 1.])
    """
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"ebb: {name} must be a tensor; got {type(tensor).__name__}")
    watch_uses()
    _C.share_storage(dst, src)

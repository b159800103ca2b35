"""Two tensors on one memory, without a copy."""

from __future__ import annotations

import torch

from ebb import _C


def share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Let ``dst`` and every tensor on its storage show the memory of ``src``, without a copy.

    ``dst``'s old memory is freed, and no version moves. ``src`` may die first: the memory lives as
    long as either storage. So a tensor whose storage was emptied (``resize_(0)``) to save memory
    can be filled again in place of every view that was made of it before. The idea is that of
    Megatron-LM's ``CheckpointWithoutOutput``.

    Args:
        dst: the tensor to fill. Its storage may be empty.
        src: has the data; same dtype, device, sizes, strides and storage offset as ``dst``, and a
            storage at least as large as ``dst``'s (as what ``dst`` shows, if that is empty). It
            cannot be resized from then on, since ``dst`` shows its memory.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: they differ in one of these, or are no plain strided tensors, or ``dst``'s
            storage is not resizable (its memory is numpy's, or a tensor shares it as ``src``).
            Nothing has changed then.

    Example:
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
    _C.share_storage(dst, src)

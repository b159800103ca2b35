"""Unpacks handles for compiled autograd; imported on its first use."""

from __future__ import annotations

import torch

from ebb import _C


@torch.compiler.disable  # type: ignore[misc]
def unpack(handle: object) -> torch.Tensor:
    """The tensor that autograd packed. Not traced, because it replays ops in C++."""
    return _C._unpack(handle)

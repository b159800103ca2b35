"""``torch.cuda.memory._record_memory_history``: torch then takes the Python stack of each piece of
memory that is freed, for which the allocator must not hold its lock. See Note [Memory given back].
"""

from __future__ import annotations

import torch

from ebb import _C

_RECORDERS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")


def watch() -> None:
    """From the first such call on, the allocator gets no memory back from ebb."""
    for name in _RECORDERS:
        if hasattr(torch._C, name):  # in builds for CUDA
            _C.watch(getattr(torch._C, name), _C.Watch.TOLD, _told)
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_initialized and torch._C._cuda_isHistoryEnabled():
        _C.stop_giving_back()


def _told(enabled: object, *_: object, **__: object) -> None:
    if enabled:
        _C.stop_giving_back()

"""Makes calls that change global state wait until no replay ahead runs (ProcessStateChange in C++).

Settings are global to the process, so a kernel that is replayed on another thread would see a
temporary change. If the program resized a storage, the kernel could access freed memory. See
Note [Nothing moves under a replay ahead].
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from ebb import _C

# Functions of torch._C that change settings of kernels. The set depends on torch's release.
SETTERS = re.compile(
    "set_num_threads|_set_(blas|cpu|cublas|cublaslt|cudnn|default_dtype|default_tensor_type"
    "|deterministic|float32|fp32|linalg|math_sdp|miopen|mkldnn|native_aot|nnpack|onednn|qengine"
    "|rocm|sdp|sm_carveout)(_.+)?"
)


def _capturing(graph: Any) -> None:
    """Prevents replays ahead during graph capture, when no thread may allocate device memory."""
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.begin_process_state_change()
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _C.end_process_state_change()
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _C.end_process_state_change()

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


_WATCHED = (
    # These give the program an alias of a tensor's memory. A write through the alias does not move
    # the tensor's version counter. `set_` and DLPack make an alias of an argument.
    (torch._C.TensorBase, _C.Watch.ALIASES, ("data", "data_ptr", "numpy", "set_")),
    (torch._C.TensorBase, _C.Watch.ALIASES, ("untyped_storage",)),
    (torch._C, _C.Watch.ALIASES, ("_to_dlpack", "_to_dlpack_versioned")),
    # These move memory.
    (torch._C.TensorBase, _C.Watch.WAITS, ("resize_", "resize_as_")),
    (torch._C._VariableFunctions, _C.Watch.WAITS, ("resize_as_",)),
    (torch._C.StorageBase, _C.Watch.RESIZES, ("resize_", "_swap_data_ptr_")),
    (torch._C.StorageBase, _C.Watch.RESIZES, ("_share_fd_cpu_", "_share_filename_cpu_")),
)


def watched() -> list[tuple[Any, str, _C.Watch]]:
    """Owners and names of the watched functions. Not every torch release has all of them."""
    setters = tuple(filter(SETTERS.fullmatch, dir(torch._C)))
    tables = ((torch._C, _C.Watch.WAITS, setters), *_WATCHED)
    return [(owner, name, watch) for owner, watch, names in tables for name in names]


@functools.cache
def install() -> None:
    """Starts to watch these functions. Called when replays ahead are first switched on."""
    for owner, name, watch in watched():
        if hasattr(owner, name):
            _C.watch(getattr(owner, name), watch)
    _capturing(torch.cuda.CUDAGraph)


def watch_memory_history() -> None:
    """From the first call of ``torch.cuda.memory._record_memory_history`` on, the allocator gets no
    memory back from ebb: torch then takes the Python stack of each piece of memory that is freed,
    for which the allocator must not hold its lock. See Note [Memory given back].
    """
    for name in ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"):
        if hasattr(torch._C, name):  # in builds for CUDA
            _C.watch(getattr(torch._C, name), _C.Watch.TOLD, _memory_history_changes)
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_initialized and torch._C._cuda_isHistoryEnabled():
        _C.stop_giving_back()


def _memory_history_changes(enabled: object, *_: object, **__: object) -> None:
    if enabled:
        _C.stop_giving_back()

"""Makes calls that change global state wait until no replay ahead runs (ProcessStateChange in C++).

Settings are global to the process, so a kernel that is replayed on another thread would see a
temporary change. If the program resized a storage, the kernel could access freed memory. See
Note [Nothing moves under a replay ahead].
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ebb import _C

# Functions of torch._C that change settings of kernels. The set depends on torch's release.
SETTERS = (
    "_set_blas_preferred_backend",
    "_set_cpu_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_tf32",
    "_set_cublaslt_prefer_grouped_gemm",
    "_set_cudnn_allow_tf32",
    "_set_cudnn_benchmark",
    "_set_cudnn_depthwise_kernel",
    "_set_cudnn_deterministic",
    "_set_cudnn_enabled",
    "_set_default_dtype",
    "_set_default_tensor_type",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_linalg_preferred_backend",
    "_set_math_sdp_allow_fp16_bf16_reduction",
    "_set_miopen_immediate",
    "_set_mkldnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_native_aot_enabled",
    "_set_native_aot_unconditional_masked",
    "_set_nnpack_enabled",
    "_set_onednn_allow_tf32",
    "_set_qengine",
    "_set_rocm_fa_preferred_backend",
    "_set_sdp_priority_order",
    "_set_sdp_use_cudnn",
    "_set_sdp_use_fa3",
    "_set_sdp_use_fa4",
    "_set_sdp_use_flash",
    "_set_sdp_use_math",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_overrideable",
    "_set_sm_carveout_experimental",
    "set_num_threads",
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


# Functions that give the program an alias of a tensor's memory. A write through the alias does not
# move the tensor's version counter. ``set_`` and DLPack make an alias of an argument.
ALIASING = (
    (torch._C.TensorBase, "data"),
    (torch._C.TensorBase, "data_ptr"),
    (torch._C.TensorBase, "numpy"),
    (torch._C.TensorBase, "set_"),
    (torch._C.TensorBase, "untyped_storage"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
)
# Methods that move memory.
MOVING = (
    (torch._C.TensorBase, "resize_", _C.Watch.WAITS),
    (torch._C.TensorBase, "resize_as_", _C.Watch.WAITS),
    (torch._C._VariableFunctions, "resize_as_", _C.Watch.WAITS),
    (torch._C.StorageBase, "resize_", _C.Watch.RESIZES),
    (torch._C.StorageBase, "_swap_data_ptr_", _C.Watch.RESIZES),
    (torch._C.StorageBase, "_share_fd_cpu_", _C.Watch.RESIZES),
    (torch._C.StorageBase, "_share_filename_cpu_", _C.Watch.RESIZES),
)


def watched() -> list[tuple[Any, str, _C.Watch]]:
    """Owners and names of the watched functions. Not every torch release has all of them."""
    return [
        *((torch._C, name, _C.Watch.WAITS) for name in SETTERS),
        *((owner, name, _C.Watch.ALIASES) for owner, name in ALIASING),
        *MOVING,
    ]


@functools.cache
def install() -> None:
    """Starts to watch these functions. Called when replays ahead are first switched on."""
    for owner, name, watch in watched():
        if hasattr(owner, name):
            _C.watch(getattr(owner, name), watch)
    _capturing(torch.cuda.CUDAGraph)

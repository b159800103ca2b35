"""What must not happen while a recipe is replayed ahead of backward: each waits for that one.

Settings are the process's: a kernel that runs beside the program would see them change for a
moment. So would it see the memory of a storage go. See Note [Nothing moves under a replay ahead].
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ebb import _C

# In torch._C: they set what kernels read. Which there are depends on torch's release.
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


class _Alone(functools.partial):  # type: ignore[type-arg]
    """No function of Python's, whose line a warning would name. Pickled by name, as a function."""

    def __reduce__(self) -> str:
        return str(self.__name__)  # type: ignore[attr-defined]


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.update_wrapper(_Alone(_C.without_replays_ahead, function), function)


def _method_alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch.UntypedStorage):
            _C.note_resized_by_hand(self)
        return _C.without_replays_ahead(method, self, *args, **kwargs)

    return alone


def _aliasing(method: Callable[..., Any]) -> Callable[..., Any]:
    """What it gives may be written through, and no version moves: see Note [Hands on a storage]."""

    @functools.wraps(method)
    def aliasing(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) in (torch.Tensor, torch.nn.Parameter):
            _C.note_alias(self)
        return method(self, *args, **kwargs)

    return aliasing


def _replace(name: str) -> None:
    """A function of torch._C, wherever a module has it, the program's own too."""
    setter = getattr(torch._C, name, None)
    if setter is None:
        return
    alone = _alone(setter)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is setter:
            setattr(module, name, alone)


def _capturing(graph: Any) -> None:
    """While a graph is captured, no thread may ask for device memory."""
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.begin_commotion()
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _C.end_commotion()
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _C.end_commotion()

    graph.capture_begin, graph.capture_end = capture_begin, capture_end


@functools.cache
def install() -> None:
    """From now on they wait. Called when replays ahead are first switched on."""
    for name in SETTERS:
        _replace(name)
    for owner, name in (
        (torch.backends.ContextProp, "__set__"),  # holds setters of its own
        (torch.UntypedStorage, "resize_"),
        (torch.UntypedStorage, "_swap_data_ptr_"),
        (torch.UntypedStorage, "_share_fd_cpu_"),
        (torch.UntypedStorage, "_share_filename_cpu_"),
        (torch.Tensor, "resize_"),
        (torch.Tensor, "resize_as_"),
    ):
        if hasattr(owner, name):  # torch 2.11 lacks some
            setattr(owner, name, _method_alone(getattr(owner, name)))
    torch.resize_as_ = _alone(torch.resize_as_)
    for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"):
        setattr(torch.Tensor, name, _aliasing(getattr(torch.Tensor, name)))
    data: Any = torch._C.TensorBase.data
    torch.Tensor.data = property(_aliasing(data.__get__), data.__set__)  # type: ignore[assignment]
    _capturing(torch.cuda.CUDAGraph)

"""Each setting of torch that may change a kernel is restored or compared, or harmless."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ebb._region.global_state_guard import SETTERS

ROOT = Path(__file__).resolve().parents[2]
KERNEL_STATE = (ROOT / "src/core/conditions/kernel_state.cpp").read_text()
LIMITS = (ROOT / "docs/limits.md").read_text()

READ = {  # by the function of at::Context that reads it
    "_set_blas_preferred_backend": "blasPreferredBackend",
    "_set_cpu_allow_fp16_reduced_precision_reduction": "allowFP16ReductionCPU",
    "_set_cublas_allow_bf16_reduced_precision_reduction": "allowBF16ReductionCuBLAS",
    "_set_cublas_allow_fp16_accumulation": "allowFP16AccumulationCuBLAS",
    "_set_cublas_allow_fp16_reduced_precision_reduction": "allowFP16ReductionCuBLAS",
    "_set_cublas_allow_tf32": "float32Precision",
    "_set_cudnn_allow_tf32": "float32Precision",
    "_set_cudnn_benchmark": "benchmarkCuDNN",
    "_set_cudnn_depthwise_kernel": "cudnnDepthwiseKernel",
    "_set_cudnn_deterministic": "deterministicCuDNN",
    "_set_cudnn_enabled": "userEnabledCuDNN",
    "_set_default_dtype": "get_default_dtype_as_scalartype",
    "_set_default_tensor_type": "get_default_dtype_as_scalartype",
    "_set_deterministic_algorithms": "deterministicAlgorithms",
    "_set_float32_matmul_precision": "float32Precision",
    "_set_fp32_precision_setter": "float32Precision",
    "_set_linalg_preferred_backend": "linalgPreferredBackend",
    "_set_miopen_immediate": "immediateMiopen",
    "_set_mkldnn_deterministic": "deterministicMkldnn",
    "_set_mkldnn_enabled": "userEnabledMkldnn",
    "_set_nnpack_enabled": "userEnabledNNPACK",
    "_set_onednn_allow_tf32": "float32Precision",
    "_set_rocm_fa_preferred_backend": "getROCmFAPreferredBackend",
    "_set_sdp_use_fa3": "userEnabledFA3SDP",
    "_set_sm_carveout_experimental": "_SMCarveout_EXPERIMENTAL",
    "set_num_threads": "get_num_threads",
}
HARMLESS = {
    "_set_deterministic_fill_uninitialized_memory": "ebb never recomputes empty tensors",
    "_set_math_sdp_allow_fp16_bf16_reduction": "read above the operators that ebb records",
    "_set_qengine": "ebb never recomputes quantised operators",
    "_set_sdp_priority_order": "read above the operators that ebb records",
    "_set_sdp_use_cudnn": "read above the operators that ebb records",
    "_set_sdp_use_flash": "read above the operators that ebb records",
    "_set_sdp_use_math": "read above the operators that ebb records",
    "_set_sdp_use_mem_efficient": "read above the operators that ebb records",
    "_set_sdp_use_overrideable": "read above the operators that ebb records",
}


def test_each_setting_is_read_or_harmless_or_named_in_the_limits():
    setters = {name for name in dir(torch._C) if SETTERS.fullmatch(name)}
    unread = setters - {*READ} - {*HARMLESS}

    assert {name for name in unread if f"`{name}`" not in LIMITS} == set()
    assert {*READ} & {*HARMLESS} == set()
    assert [name for name in {*READ} | {*HARMLESS} if not SETTERS.fullmatch(name)] == []


def test_the_kernel_state_has_each_setting_that_is_read():
    missing = [name for name in READ.values() if not re.search(rf"\b{name}\(", KERNEL_STATE)]

    assert missing == []

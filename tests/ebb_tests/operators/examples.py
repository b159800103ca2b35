"""Calls of operators whose arguments are hard to guess: shapes that fit, packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

A, Q, M = torch.ops.aten, torch.ops.quantized, torch.ops.mkldnn


def r(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) * 0.9 + 0.05).requires_grad_()


def q(*shape: int, kind: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.rand(shape), 0.1, 2, kind)


def packed_conv(dims: int, *, transposed: bool = False) -> Any:
    ones, zeros = [1] * dims, [0] * dims
    weight = q(4, 4, *[3] * dims, kind=torch.qint8)
    if transposed:
        prepack = getattr(Q, f"conv_transpose{dims}d_prepack")
        return prepack(weight, torch.rand(4), ones, zeros, zeros, ones, 1)
    return getattr(Q, f"conv{dims}d_prepack")(weight, torch.rand(4), ones, zeros, ones, 1)


def packed_linear() -> Any:
    return Q.linear_prepack(q(3, 4, kind=torch.qint8), torch.rand(3))


def byte_rows() -> torch.Tensor:
    return Q.embedding_bag_byte_prepack(torch.rand(8, 16))


def cell(gates: int) -> Any:
    weight = q(gates * 4, 4, kind=torch.qint8)
    packed = Q.linear_prepack(weight, None)
    bias = torch.zeros(gates * 4)
    return Q.make_quantized_cell_params_dynamic(packed, packed, bias, bias, True)


INDICES = torch.tensor([0, 2, 1, 3])
MASK = torch.tensor([[True, True, False], [True, True, True]])
OFFSETS = torch.tensor([0, 2])
STATS = (torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4) + 0.1)

PROGRAMS: tuple[Callable[[], Any], ...] = (
    lambda: F.interpolate(r(2, 4, 4, 4), scale_factor=2, mode="nearest"),
    lambda: F.interpolate(r(2, 4, 3, 3, 3), scale_factor=2, mode="nearest"),
    lambda: F.interpolate(r(2, 4, 4, 4), scale_factor=2, mode="nearest-exact"),
    lambda: F.interpolate(r(2, 4, 3, 3, 3), scale_factor=2, mode="nearest-exact"),
    lambda: F.interpolate(r(2, 4, 8, 8), size=(5, 5), mode="bicubic", antialias=True),
    lambda: F.interpolate(r(2, 4, 8, 8), size=(5, 5), mode="bilinear", antialias=True),
    lambda: F.nll_loss(r(2, 4, 3, 3), torch.ones(2, 3, 3, dtype=torch.int64)),
    lambda: F.pad(r(2, 4, 3, 3, 3), [1] * 6, mode="reflect"),
    lambda: F.pad(r(2, 4, 3, 3, 3), [1] * 6, mode="replicate"),
    lambda: F.grid_sample(r(2, 4, 4, 4), r(2, 3, 3, 2), align_corners=False),
    lambda: A._grid_sampler_2d_cpu_fallback(r(2, 4, 4, 4), torch.rand(2, 3, 3, 2), 0, 0, True),
    lambda: F.affine_grid(r(2, 2, 3), [2, 4, 3, 3], align_corners=False),
    lambda: A._slow_conv2d_forward(r(2, 4, 5, 5), r(4, 4, 3, 3), [3, 3], None, [1, 1], [0, 0]),
    lambda: A.thnn_conv2d(r(2, 4, 5, 5), r(4, 4, 3, 3), [3, 3]),
    lambda: A.slow_conv3d(r(2, 4, 5, 5, 5), r(4, 4, 3, 3, 3), [3, 3, 3]),
    lambda: A.slow_conv_dilated2d(r(2, 4, 5, 5), r(4, 4, 3, 3), [3, 3]),
    lambda: A.slow_conv_dilated3d(r(2, 4, 5, 5, 5), r(4, 4, 3, 3, 3), [3, 3, 3]),
    lambda: A.slow_conv_transpose2d(r(2, 4, 5, 5), r(4, 4, 3, 3), [3, 3]),
    lambda: A.slow_conv_transpose2d(r(4, 5, 5).detach(), r(4, 4, 3, 3).detach(), [3, 3]),
    lambda: A.slow_conv_transpose3d(r(2, 4, 5, 5, 5), r(4, 4, 3, 3, 3), [3, 3, 3]),
    lambda: A.mkldnn_convolution(r(2, 4, 5, 5), r(4, 4, 3, 3), None, [0, 0], [1, 1], [1, 1], 1),
    lambda: nn.LSTM(4, 3)(r(5, 2, 4))[0],
    lambda: nn.GRU(4, 3, num_layers=2)(r(5, 2, 4))[0],
    lambda: nn.RNN(4, 3)(r(5, 2, 4))[0],
    lambda: nn.LSTMCell(4, 3)(r(2, 4))[0],
    lambda: nn.GRUCell(4, 3)(r(2, 4)),
    lambda: nn.utils.rnn.pack_padded_sequence(r(5, 2, 4), torch.tensor([5, 3])).data,
    lambda: A._pack_padded_sequence(r(5, 2, 4), torch.tensor([5, 3]), False),
    lambda: nn.utils.rnn.pad_packed_sequence(
        nn.utils.rnn.pack_padded_sequence(r(5, 2, 4), torch.tensor([5, 3]))
    )[0],
    lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(torch.rand(2, 3, 8)),
    lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval()(*[torch.rand(2, 3, 8)] * 3)[0],
    lambda: A._transform_bias_rescale_qkv(torch.rand(2, 3, 24), torch.rand(24), 2),
    lambda: A._nested_tensor_from_mask(torch.rand(2, 3, 8), MASK),
    lambda: A._nested_tensor_from_mask_left_aligned(torch.rand(2, 3, 8), MASK),
    lambda: A._nested_from_padded(torch.rand(2, 3, 8), torch.tensor([[2, 8], [3, 8]])),
    lambda: A._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 16, dtype=torch.int8)),
    lambda: A._grouped_mm(torch.rand(2, 16, 16).bfloat16(), torch.rand(2, 16, 16).bfloat16()),
    lambda: A.native_batch_norm(r(2, 4, 3), *STATS, True, 0.1, 1e-5)[0],
    lambda: A._native_batch_norm_legit(r(2, 4, 3), *STATS, True, 0.1, 1e-5)[0],
    lambda: A._native_batch_norm_legit.no_stats(r(2, 4, 3), *STATS[:2], True, 0.1, 1e-5)[0],
    lambda: A._batch_norm_with_update(r(2, 4, 3), *STATS, 0.1, 1e-5)[0],
    lambda: A._batch_norm_no_update(r(2, 4, 3), *STATS, 0.1, 1e-5)[0],
    lambda: A._batch_norm_impl_index(r(2, 4, 3), *STATS, True, 0.1, 1e-5, False)[0],
    lambda: A.rrelu_with_noise(r(2, 4), torch.rand(2, 4), 0.1, 0.3, True),
    lambda: A._validate_compressed_sparse_indices(
        True, torch.tensor([0, 1, 2]), torch.tensor([0, 1]), 2, 2, 2
    ),
    lambda: A._convert_indices_from_csr_to_coo(torch.tensor([0, 1, 2]), torch.tensor([0, 1])),
    lambda: A._spdiags(torch.rand(2, 4), torch.tensor([0, 1]), [4, 4]),
    lambda: A._embedding_bag(r(8, 4), INDICES, OFFSETS)[0],
    lambda: A._embedding_bag_dense_backward(
        torch.rand(2, 4), INDICES, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]), OFFSETS, 8,
        False, 0, None,
    ),
    lambda: A.mkldnn_max_pool2d(r(2, 4, 4, 4).detach().to_mkldnn(), [2, 2], [2, 2]),
    lambda: A.mkldnn_max_pool3d(torch.rand(2, 4, 4, 4, 4).to_mkldnn(), [2, 2, 2], [2, 2, 2]),
    lambda: A.mkldnn_adaptive_avg_pool2d(torch.rand(2, 4, 4, 4).to_mkldnn(), [2, 2]),
    lambda: M._convolution_pointwise(
        torch.rand(2, 4, 5, 5), torch.rand(4, 4, 3, 3), None, [0, 0], [1, 1], [1, 1], 1,
        "relu", [], "",
    ),
    lambda: M._convolution_pointwise.binary(
        torch.rand(2, 4, 5, 5), torch.rand(2, 4, 3, 3), torch.rand(4, 4, 3, 3), None,
        [0, 0], [1, 1], [1, 1], 1, "add", 1.0, None, [], None,
    ),
    lambda: M._convolution_pointwise_.binary(
        torch.rand(2, 4, 3, 3), torch.rand(2, 4, 5, 5), torch.rand(4, 4, 3, 3), None,
        [0, 0], [1, 1], [1, 1], 1, "add", 1.0, "relu", [], None,
    ),
    lambda: M._convolution_transpose_pointwise(
        torch.rand(2, 4, 5, 5), torch.rand(4, 4, 3, 3), None, [0, 0], [0, 0], [1, 1], [1, 1], 1,
        "relu", [], "",
    ),
    lambda: M._linear_pointwise.binary(
        torch.rand(2, 4), torch.rand(2, 3), torch.rand(3, 4), None, "add"
    ),
    *(
        lambda dims=dims, name=name: getattr(Q, name)(
            q(2, 4, *[5] * dims), packed_conv(dims), 0.1, 2
        )
        for dims in (1, 2, 3)
        for name in (f"conv{dims}d", f"conv{dims}d_relu")
    ),
    *(
        lambda dims=dims: getattr(Q, f"conv_transpose{dims}d")(
            q(2, 4, *[5] * dims), packed_conv(dims, transposed=True), 0.1, 2
        )
        for dims in (1, 2, 3)
    ),
    *(
        lambda dims=dims: getattr(Q, f"conv{dims}d_dynamic")(
            torch.rand(2, 4, *[5] * dims), packed_conv(dims)
        )
        for dims in (1, 2, 3)
    ),
    lambda: Q.linear(q(2, 4), packed_linear(), 0.1, 2),
    lambda: Q.linear_relu(q(2, 4), packed_linear(), 0.1, 2),
    *(
        lambda name=name, dims=dims: getattr(Q, name)(q(2, 4, *[3] * dims), *STATS, 1e-5, 0.1, 2)
        for name, dims in (
            ("batch_norm", 2), ("batch_norm_relu", 2), ("batch_norm1d", 1),
            ("batch_norm1d_relu", 1),
            ("batch_norm2d", 2), ("batch_norm2d_relu", 2), ("batch_norm3d", 3),
            ("batch_norm3d_relu", 3),
        )
    ),
    lambda: A.quantized_batch_norm(q(2, 4, 3, 3), *STATS, 1e-5, 0.1, 2),
    lambda: Q.group_norm(q(2, 4, 3, 3), 2, torch.rand(4), torch.rand(4), 1e-5, 0.1, 2),
    lambda: Q.instance_norm(q(2, 4, 3, 3), torch.rand(4), torch.rand(4), 1e-5, 0.1, 2),
    lambda: Q.elu(q(2, 4), 0.1, 2),
    lambda: Q.leaky_relu(q(2, 4), 0.01, False, 0.1, 2),
    lambda: Q.threshold(q(2, 4), 0.1, 0.0),
    lambda: Q.matmul(q(2, 4), q(4, 2), 0.1, 2),
    lambda: Q.max_pool1d(q(2, 4, 6), [2], [2], [0], [1], False),
    lambda: A.quantized_max_pool3d(q(2, 4, 4, 4, 4), [2, 2, 2], [2, 2, 2]),
    *(
        lambda name=name: getattr(Q, name)(q(2, 4), q(2, 4), 0.1, 2)
        for name in ("add", "add_relu", "mul", "mul_relu")
    ),
    *(
        lambda name=name: getattr(Q, name)(q(2, 4), q(2, 4), q(2, 4))
        for name in ("add_out", "add_relu_out", "mul_out", "mul_relu_out")
    ),
    *(
        lambda name=name: getattr(Q, name)(q(2, 4), 0.5)
        for name in ("add", "add_scalar", "add_scalar_relu", "mul", "mul_scalar", "mul_scalar_relu")
    ),
    lambda: Q.embedding_bag_byte_rowwise_offsets(byte_rows(), INDICES, OFFSETS),
    lambda: Q.embedding_bag_byte_unpack(byte_rows()),
    lambda: Q.embedding_bag_4bit_rowwise_offsets(
        Q.embedding_bag_4bit_prepack(torch.rand(8, 16)), INDICES, OFFSETS
    ),
    lambda: Q.embedding_bag_4bit_unpack(Q.embedding_bag_4bit_prepack(torch.rand(8, 16))),
    lambda: Q.embedding_bag_2bit_unpack(Q.embedding_bag_2bit_prepack(torch.rand(8, 16))),
    lambda: Q.quantized_lstm_cell_dynamic(
        torch.rand(2, 4), [torch.rand(2, 4), torch.rand(2, 4)],
        packed_gates(4), packed_gates(4), torch.rand(16), torch.rand(16),
    ),
    *(
        lambda name=name, gates=gates: getattr(Q, name)(
            torch.rand(2, 4), torch.rand(2, 4), packed_gates(gates), packed_gates(gates),
            torch.rand(gates * 4), torch.rand(gates * 4),
        )
        for name, gates in (
            ("quantized_gru_cell_dynamic", 3), ("quantized_rnn_relu_cell_dynamic", 1),
            ("quantized_rnn_tanh_cell_dynamic", 1),
        )
    ),
    lambda: A.quantized_lstm(
        torch.rand(5, 2, 4), [torch.rand(1, 2, 4), torch.rand(1, 2, 4)], [cell(4)],
        True, 1, 0.0, False, False, False, dtype=torch.qint8, use_dynamic=True,
    ),
)  # fmt: skip


def packed_gates(gates: int) -> Any:
    return Q.linear_prepack(q(gates * 4, 4, kind=torch.qint8), torch.rand(gates * 4))

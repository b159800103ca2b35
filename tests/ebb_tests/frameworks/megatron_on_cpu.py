"""Replaces functions of CUDA, TransformerEngine and Apex, so that Megatron-Core runs on a CPU."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch


def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def replace(owner: Any, **stand_ins: Any) -> None:
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(owner, name, stand_in, raising=False)

    replace(
        torch.cuda,
        current_device=lambda: "cpu",
        get_rng_state=torch.get_rng_state,
        manual_seed=torch.manual_seed,
        Stream=mock.MagicMock,
        current_stream=mock.MagicMock,
        stream=contextlib.nullcontext,
        synchronize=lambda: None,
    )
    replace(
        random,
        _get_cuda_rng_state=lambda **ignored: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, **ignored: torch.set_rng_state(state),
    )
    replace(torch, zeros=zeros_on_cpu(torch.zeros))
    replace(moe_utils, te_general_gemm=None)
    replace(token_dispatcher, maybe_move_tensor_to_cpu=as_it_is)
    replace(WrappedTorchNorm, __new__=layer_norm)  # the original forbids sequence parallelism


def zeros_on_cpu(zeros: Any) -> Any:
    def made(*sizes: Any, device: Any = None, **settings: Any) -> torch.Tensor:
        return zeros(*sizes, device="cpu" if device == "cuda" else device, **settings)

    return made


def as_it_is(tensor: Any, as_numpy: bool = False, **ignored: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def layer_norm(wrapper: type, config: Any, hidden_size: int, **ignored: Any) -> torch.nn.Module:
    return torch.nn.LayerNorm(hidden_size, config.layernorm_epsilon)

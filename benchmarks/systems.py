"""The systems that benchmarks compare: ebb and its peers on one module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ebb

Blocks = Iterable[nn.Module]
Runner = Callable[..., torch.Tensor]

ATEN = torch.ops.aten
MATMULS_AND_ATTENTION = [
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]


def systems() -> dict[str, Runner]:
    """Each runs (block, *inputs) and gives the block's output."""

    def in_region(policy: ebb.Policy) -> Runner:
        def run(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
            with ebb.region(policy):
                return block(*inputs)

        return run

    selective = functools.partial(create_selective_checkpoint_contexts, MATMULS_AND_ATTENTION)
    return {
        "eager": lambda block, *inputs: block(*inputs),
        "AC (torch.utils.checkpoint)": functools.partial(checkpoint, use_reentrant=False),
        "SAC (matmuls and sdpa saved)": functools.partial(
            checkpoint, use_reentrant=False, context_fn=selective
        ),
        "ebb recompute_all": in_region(ebb.policies.recompute_all),
        "ebb save_matmuls": in_region(ebb.policies.save_matmuls),
        "ebb torchtitan": in_region(ebb.policies.torchtitan),
        "ebb save_all": in_region(ebb.policies.save_all),
    }

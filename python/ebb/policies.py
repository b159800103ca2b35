"""Policies with a name.

>>> with ebb.region(ebb.policies.save_matmuls):
...     pass
"""

from __future__ import annotations

from ebb import _C
from ebb._policy import Policy

__all__ = ["offload_inputs", "recompute_all", "save_all", "save_matmuls", "torchtitan"]

recompute_all: Policy = Policy._from_compiled(_C.recompute_all())
"""Keeps nothing but leaves: the most memory saved, the most recomputed."""

save_all: Policy = Policy._from_compiled(_C.save_all())
"""Keeps everything that anything needs, as if ebb were not there."""

save_matmuls: Policy = Policy._from_compiled(_C.save_matmuls())
"""Keeps what is dear to recompute: matrix products, convolutions and attention."""

offload_inputs: Policy = Policy._from_compiled(_C.offload_inputs())
"""Recomputes everything, and moves to the host what the region reads and another autograd function
computed: the activations between blocks."""

torchtitan: Policy = Policy._from_compiled(_C.torchtitan())
"""torchtitan's selective activation checkpointing: attention and collectives kept, and every second
matrix product. Source: https://github.com/pytorch/torchtitan"""

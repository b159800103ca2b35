"""Policies with a name.

>>> with ebb.region(ebb.policies.save_matmuls):
...     pass
"""

from __future__ import annotations

from ebb import _C
from ebb._policy import Policy

__all__ = ["recompute_all", "save_all", "save_matmuls", "torchtitan"]

recompute_all: Policy = Policy._from_compiled(_C.recompute_all())
"""Keeps nothing but leaves: the most memory saved, the most recomputed."""

save_all: Policy = Policy._from_compiled(_C.save_all())
"""Keeps everything that anything needs, as if ebb were not there."""

save_matmuls: Policy = Policy._from_compiled(_C.save_matmuls())
"""Keeps what is dear to recompute: matrix products, convolutions and attention."""

torchtitan: Policy = Policy._from_compiled(_C.torchtitan())
"""torchtitan's selective activation checkpointing: attention and collectives kept, and every second
matrix product. Source: https://github.com/pytorch/torchtitan"""

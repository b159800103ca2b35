"""Under torch.compile ebb steps aside: the compiler decides what is kept.

ebb sees no op of a graph that torch.compile has made. Handing a region to torch.utils.checkpoint
while it is traced would give torch's partitioner the policy, but a function that writes to a buffer
or draws without the partitioner's knowledge would then give other gradients. So that is left to the
user, who knows the function: ``policy.to_sac()``.
"""

from __future__ import annotations

import functools
import warnings

import torch


@functools.cache
def _warn() -> None:
    warnings.warn(
        "ebb: a region is traced by torch.compile, which decides by itself what is kept there. To "
        "give it the policy: torch.utils.checkpoint.checkpoint(function, ..., use_reentrant=False, "
        "context_fn=policy.to_sac()), for a function that writes to nothing but its results.",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result  # type: ignore[misc]
def region_is_traced() -> bool:
    """Says so, once; called while Dynamo traces."""
    _warn()
    return True

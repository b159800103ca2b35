"""Names for values, which rules can match."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._support.shown import as_utf8, shown
from ebb._support.subclasses import plain_tensors


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a tensor a name for rules with ``name=``, as JAX's ``checkpoint_name`` does.

    checkpoint_name does nothing outside of regions, for tensors that no region computed, and under
    ``torch.compile``. The decision made when the tensor was computed stays if its rule comes before
    the rule with the name.

    Args:
        x: a tensor of any shape.
        name: its name.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type.

    Examples:
        >>> policy = ebb.policies.save_only_these_names("attn_out")
        >>> with ebb.region(policy):
        ...     h = ebb.checkpoint_name(torch.ones(2, requires_grad=True).exp(), "attn_out")
    """
    if is_compiling():
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"ebb: checkpoint_name: x must be a tensor; got {type(x).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"ebb: checkpoint_name: name must be a str; got {shown(name)}")
    for inner in plain_tensors(x):
        _C.name_value(inner, as_utf8(name))
    return x

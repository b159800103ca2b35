"""Takes wrapper subclasses apart and rebuilds them, by torch's own protocol.

C++ calls these when autograd packs and unpacks. See Note [Wrapper subclasses] in saved_tensor.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class WrapperParts(NamedTuple):
    """All parts of a wrapper except its inner tensors."""

    kind: type[Any]
    tensors: list[str]  # attributes that hold the inner tensors
    others: dict[str, Any]  # other attributes that the protocol names
    context: Any  # the context that the class's __tensor_flatten__ returned
    size: torch.Size
    stride: tuple[int, ...]


def flatten(tensor: torch.Tensor) -> tuple[list[torch.Tensor], WrapperParts] | None:
    """The inner tensors of a wrapper and its other parts; None if the class has no protocol."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    if (wait := getattr(tensor, "trigger_wait", None)) is not None:
        wait()  # torch's AsyncCollectiveTensor: incomplete until now, and may be copied
    try:
        names, context = tensor.__tensor_flatten__()
        attributes = {name: getattr(tensor, name) for name in names}
    except Exception:  # then ebb saves the wrapper as a whole, like one without the protocol
        return None
    tensors = [name for name in names if isinstance(attributes[name], torch.Tensor)]
    others = {name: value for name, value in attributes.items() if name not in tensors}
    parts = WrapperParts(type(tensor), tensors, others, context, tensor.size(), tensor.stride())
    return [attributes[name] for name in tensors], parts


def unflatten(parts: WrapperParts, inner: list[torch.Tensor]) -> torch.Tensor:
    """Rebuilds the wrapper that `flatten` took apart, around other inner tensors."""
    attributes = parts.others | dict(zip(parts.tensors, inner, strict=True))
    whole: torch.Tensor = parts.kind.__tensor_unflatten__(
        attributes, parts.context, parts.size, parts.stride
    )
    return whole


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or the plain tensors inside a wrapper, a sparse or a nested tensor."""
    if (parts := flatten(tensor)) is not None:
        for inner in parts[0]:
            yield from plain_tensors(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested:
        yield tensor.values()
    else:
        yield tensor

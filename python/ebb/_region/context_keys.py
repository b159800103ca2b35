"""Keys of a ``context_fn``, by which ebb finds its policy again if a job makes it for each call."""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict
from typing import Any

import torch

_DEEPEST = 10  # nested arguments
_LONGEST = 1000  # parts of a key
_VALUES = (
    bool, int, float, complex, str, bytes, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_COLLECTIONS = (list, tuple, set, frozenset, torch.Size)
_TABLES = (dict, defaultdict)


# Note [Keys of a context_fn]
# A key stands for a function and all that it was made with: its code and globals, the contents of
# its closure, its defaults, and the arguments of `functools.partial`. Two functions with equal keys
# give the same answers as long as they read no other state. Containers and plain values count by
# their contents at the time of the call, other objects by their identity. A key keeps no such
# object alive, and equals no other key after the object has been freed.
class Same:
    """Equal to another only if both stand for one object that is alive."""

    def __init__(self, value: object) -> None:
        self._id = id(value)
        self._ref = weakref.ref(value)

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        value = self._ref()
        return value is not None and value is other._ref()


Key = tuple[Any, ...]


def key_of(context_fn: object) -> Key | None:
    """See Note [Keys of a context_fn]. None if the function cannot be told from others."""
    parts: list[Any] = []
    try:
        _add(context_fn, parts, _DEEPEST)
    except (TypeError, ValueError):  # no weak references; an empty cell of a closure; too large
        return None
    return tuple(parts)


def _add(value: Any, parts: list[Any], depth: int) -> None:
    kind = type(value)
    if depth == 0 or len(parts) > _LONGEST:
        raise ValueError("too large for a key")
    if kind in _VALUES:
        parts += [kind, repr(value) if kind in (float, complex) else value]  # 0.0 == -0.0
        return
    inner = _contents(value, kind)
    if inner is None:
        parts.append(Same(value))
        return
    parts += [kind, len(inner)]
    for part in inner:
        _add(part, parts, depth - 1)


def _contents(value: Any, kind: type) -> list[Any] | None:
    """The values that `value` consists of; None for an object that counts by its identity."""
    if kind in _COLLECTIONS:
        return list(value)
    if kind in _TABLES:
        factory = [value.default_factory] if kind is defaultdict else []
        return [*factory, *(part for item in value.items() for part in item)]
    if kind is functools.partial:
        return [value.func, value.args, value.keywords]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is types.FunctionType and not value.__dict__:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        made_in = id(
            value.__globals__
        )  # code has other globals only if a program executes it twice
        return [value.__code__, made_in, cells, value.__defaults__, value.__kwdefaults__]
    return None

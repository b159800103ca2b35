"""Modules of a model by name, with and without the parts that wrappers add to names.

`ebb.apply`, EBB_MODULES, rules with ``module=`` and messages share one convention: a wrapper adds
nothing to the plain name, so the wrapped module has the wrapper's plain name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

# Attributes in which torch.compile, checkpoint wrappers, FSDP, Lightning's Fabric and PEFT keep the
# wrapped module.
_WRAPPED = frozenset(
    {
        "_checkpoint_wrapped_module",
        "_forward_module",
        "_fsdp_wrapped_module",
        "_orig_mod",
        "base_layer",
    }
)
# Classes of torch, apex, Megatron-LM and DeepSpeed that keep the wrapped module as `module`. Other
# classes use `module` as an ordinary name. Strings, so that nothing is imported.
_WRAPPERS = frozenset(
    {
        "AveragedModel",
        "BFloat16Module",
        "DataParallel",
        "DeepSpeedEngine",
        "DistributedDataParallel",
        "Float16Module",
    }
)


class NamedModule(NamedTuple):
    """A module, its name as `named_modules` gives it, and the name without parts of wrappers."""

    name: str
    plain: str
    module: torch.nn.Module


def modules_of(model: torch.nn.Module) -> Iterator[NamedModule]:
    """The model and all modules inside it, each once; owners before their parts."""
    seen: dict[str, NamedModule] = {}
    for name, module in model.named_modules():
        owner_name, _, part = name.rpartition(".")
        owner = seen.get(owner_name)
        outside = owner.plain if owner else owner_name
        plain = outside if _is_wrapped(owner, part) else f"{outside}.{part}".lstrip(".")
        seen[name] = NamedModule(name, plain, module)
        yield seen[name]


def _is_wrapped(owner: NamedModule | None, part: str) -> bool:
    """True if `part` is the attribute in which a wrapper keeps the wrapped module."""
    if part in _WRAPPED:
        return True
    classes = type(owner.module).__mro__ if owner and part == "module" else ()
    return any(kind.__name__ in _WRAPPERS for kind in classes)


def names_of(model: torch.nn.Module) -> set[str]:
    """All names of the modules of a model, with and without parts of wrappers."""
    return {name for named in modules_of(model) for name in (named.name, named.plain)}


def plain_names(models: list[torch.nn.Module]) -> list[str]:
    """The names of the modules inside these models, without parts of wrappers, each once."""
    found = (named.plain for model in models for named in modules_of(model))
    return list(dict.fromkeys(filter(None, found)))

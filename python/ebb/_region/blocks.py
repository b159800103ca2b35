"""Finds the modules of a model that should become regions, from the model's structure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable

import torch
from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NUMBERED = re.compile(r"\d+[a-z]?$")  # down1, inception4b
# Names of modules that are never blocks: experts are parts of one block, and parametrizations are
# not parts of the model.
_NO_PARTS = re.compile(r"expert|^parametrizations$", re.IGNORECASE)
# Classes of modules with small activations. A module with only such layers is not a block.
_SMALL = re.compile(r"(norm(\dd)?|embeddings?|embeddingbag)$", re.IGNORECASE)

Found = list[nn.Module]


# Note [Blocks]
# The inputs of each region stay in memory, and backward recomputes a region at once. Regions should
# therefore be the modules that a model repeats: layers of a transformer, blocks of a ResNet. A
# region that is too large costs little: a whole Sequential of Linear and ReLU is fine. A region
# that is too small saves nothing: a Linear by itself has no activations inside to free. The search
# order is:
#
# 1. Lists (ModuleList, Sequential) with at least two entries of one class: the entries are blocks,
#    if they have at least two layers each. If the entries differ, as stages of a ResNet do, and
#    contain such lists, the entries of those lists are blocks. Modules beside the lists are blocks
#    too if they have submodules (a stem, a decoder) or are recurrent layers, unless they contain
#    one of the blocks (a model may hold a module under two names).
# 2. Without such lists: attributes whose names differ by a number, as down1 and down2 of a U-Net.
# 3. Rules 1 and 2 again, for blocks of one layer.
# 4. Otherwise the submodules of the model that have submodules; or the model.


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's blocks, as ``model.named_modules()`` gives them: at least one, none inside
    another. The empty name is the model itself."""
    found: Found = []
    for least in (2, 1):
        for search in (_in_lists, _numbered):
            found = found or search(model, least)
    return _names_of(model, found or _without_repetition(model))


def regions_by_default(model: nn.Module) -> tuple[str, ...]:
    """The blocks that become regions if the user names no modules. Empty if the only block has all
    layers of the model: its peak memory would be eager's."""
    names = find_blocks(model)
    is_whole = len(names) == 1 and _layers(model.get_submodule(names[0])) == _layers(model)
    return () if is_whole else names


def block_candidates(model: nn.Module) -> list[tuple[str, ...]]:
    """Possible sets of regions, in the order in which a budget tries them: the blocks; the parts of
    the model, if blocks leave too much work outside of regions; the model itself."""
    parts = [one for part in model.children() if _layers(part) > 0 for one in _callable(part)]
    parts = [one for one in parts if one._modules or not _is_torchs(one)]
    found = (find_blocks(model), _names_of(model, parts), ("",))
    return [names for names in dict.fromkeys(found) if names]


def _names_of(model: nn.Module, wanted: Found) -> tuple[str, ...]:
    """The names of the wanted modules, without modules inside another wanted one."""
    known = set(map(id, wanted))
    names = [name for name, module in model.named_modules() if id(module) in known]
    inside = [n for n in names if any(n.startswith(f"{o}.") for o in names if o != n)]
    return tuple(name for name in names if name not in inside)


def _in_lists(module: nn.Module, least: int) -> Found:
    """The repeated entries of lists, outermost lists first. A block has at least `least` layers."""
    inner = {part: _in_lists(part, least) for part in _parts(module).values()}
    if isinstance(module, _LISTS):
        entries = [part for part in inner if _is_block(part, least, module)]
        if _is_repeated(module, entries):
            others = [part for part in inner if _is_made_of_parts(part)]
            chosen = [part for part in inner if part in entries or part in others]
            if _are_alike(entries):
                return [one for part in chosen for one in _callable(part)]
            return [one for part in chosen for one in inner[part] or _callable(part)]
    return _with_rest(inner)


def _numbered(module: nn.Module, least: int) -> Found:
    """Parts whose names differ by a number."""
    parts = _parts(module)
    blocks = [n for n, part in parts.items() if _is_made_of_parts(part) and _layers(part) >= least]
    alike = Counter(_NUMBERED.sub("", name) for name in blocks if _NUMBERED.search(name))
    if not isinstance(module, _LISTS) and max(alike.values(), default=0) > 1:
        return [
            one for part in parts.values() if _is_made_of_parts(part) for one in _callable(part)
        ]
    return _with_rest({part: _numbered(part, least) for part in parts.values()})


def _with_rest(inner: dict[nn.Module, Found]) -> Found:
    """The blocks in `inner`, and the other parts of the module, if they contain no block."""
    known = {one for blocks in inner.values() for one in blocks}
    found = []
    for part, blocks in inner.items():
        is_rest = known and not known & set(part.modules()) and _is_made_of_parts(part)
        found += _callable(part) if is_rest else blocks
    return found


def _without_repetition(module: nn.Module) -> Found:
    parts = [part for part in _parts(module).values() if _layers(part) > 0]
    if len(parts) == 1 and _layers(parts[0]) == _layers(module) and has_forward(parts[0]):
        return _without_repetition(parts[0])  # `module` is a wrapper
    large = [one for part in parts if _is_made_of_parts(part) for one in _callable(part)]
    return large if len(large) > 1 else [module]


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    return {n: part for n, part in module.named_children() if not _NO_PARTS.search(n)}


def _layers(module: nn.Module) -> int:
    """The number of modules inside that have weights and large activations."""
    return sum(
        bool(one._parameters or "weight" in one.__dict__)  # FSDP keeps views in __dict__
        and not _SMALL.search(type(one).__name__)
        for one in module.modules()
    )


def _is_made_of_parts(module: nn.Module) -> bool:
    """True if the module runs more than one operator, and a submodule has weights."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return isinstance(module, nn.RNNBase) or (bool(_parts(module)) and _layers(module) > 0)


def _is_block(part: nn.Module, least: int, owner: nn.Module) -> bool:
    """True if the entry `part` of the container `owner` is a block. A user's module without
    submodules is a block only if `owner` contains no torch.nn layer with weights."""
    if _layers(part) < least:
        return False
    if _is_made_of_parts(part):
        return True
    torchs = (one for one in _parts(owner).values() if _is_torchs(one))
    is_alone = all(_parts(one) or not _layers(one) for one in torchs)
    return is_alone and not _is_torchs(part)


def _is_repeated(module: nn.Module, entries: Found) -> bool:
    if len(entries) == 1:  # a model of one layer
        return isinstance(module, nn.ModuleList)
    return max(Counter(map(_class_of, entries)).values(), default=0) > 1


def _are_alike(entries: Found) -> bool:
    """True if most entries have the structure of another entry."""
    kinds = Counter(map(_built, entries))
    return 2 * sum(count for count in kinds.values() if count > 1) > len(entries)


def _built(module: nn.Module) -> Hashable:
    return tuple(
        (name, _class_of(one), tuple((n, _shape(p)) for n, p in one._parameters.items()))
        for name, one in module.named_modules()
    )


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _shape(parameter: nn.Parameter | None) -> tuple[int, ...]:
    return () if parameter is None else tuple(getattr(parameter, "ds_shape", parameter.shape))


def _callable(part: nn.Module) -> Found:
    """The part itself, or the entries of a list without a forward. torch's layers by themselves are
    not blocks, because they have no activations inside to free."""
    if has_forward(part):
        return [part]
    inner = [one for one in _parts(part).values() if _layers(one) > 0]
    own = [one for one in inner if _parts(one) or not _is_torchs(one)]
    return [found for one in own for found in _callable(one)]


def has_forward(module: nn.Module) -> bool:
    """True if a module can be called; a ModuleList cannot."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")

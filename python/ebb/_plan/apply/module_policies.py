"""Policies for a model's modules, by module name: apply, save and load."""

from __future__ import annotations

import glob
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ebb import _C
from ebb._config import change_until
from ebb._policy.decision import PAGE
from ebb._policy.policy import Policy
from ebb._policy.text import Regions, loaded_regions, parsed_regions, regions_to_toml
from ebb._region.apply import RegionHandle, apply
from ebb._region.module_names import names_of
from ebb._region.region import _check_policy
from ebb._support import deferred
from ebb._support.names import in_ranges
from ebb._support.private_files import write_private
from ebb._support.shown import shown
from ebb.experimental.paging import reset

_HEAD = """\
# Policies of modules that become regions. Load them with
#     ebb.ModulePolicies.load("{name}").apply(model)
# or, without changing the job's code, with EBB={name}
"""


@dataclass(frozen=True)
class ProcessSettings:
    """Process-wide settings while policies are in place."""

    # Settings of ebb.config.offload; empty: unchanged.
    offload: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = True  # False disables replays ahead of backward; True leaves them as configured
    pages: bool = False  # True if the policies use page pools, which get new sizes

    def put(self, undo: ExitStack) -> None:
        """Put the settings in place until `undo` is closed."""
        wanted = {f"offload.{name}": value for name, value in self.offload.items()}
        if not self.ahead:
            wanted["ahead.regions"] = 0
        if wanted:
            change_until(undo, wanted)
        if self.pages:
            _size_pools_anew()
            undo.callback(_size_pools_anew)


def _size_pools_anew() -> None:
    """Record pool sizes again in the next step, since other values are paged from now on."""
    _C.paging_record_next()
    if _C.paging_stats()["stashes"] == 0:
        with suppress(RuntimeError):  # raised inside a step
            reset()


class RegionHandles:
    """Handle for modules that became regions, under one or more policies.

    Attributes:
        names: fully qualified names of the modules.
    """

    def __init__(self, handles: list[RegionHandle]) -> None:
        self._handles = handles
        self._undo = ExitStack()  # undoes all other changes
        self.names = tuple(name for handle in handles for name in handle.names)

    def remove(self) -> None:
        """Restore the modules' own forward.

        Raises:
            RuntimeError: as ``RegionHandle.remove``.
        """
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        self._undo.close()

    def __enter__(self) -> RegionHandles:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class ModulePolicies:
    """Modules of a model that are regions, each with its own policy.

    Attributes:
        policies: policy by the module's fully qualified name.

    Args:
        policies: policy by the module's fully qualified name.
        offload: settings of ``ebb.config.offload`` that these policies need; empty: none.
        ahead: False disables replays ahead of backward; True leaves them as
            ``ebb.config.ahead`` sets them.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> handle = ebb.ModulePolicies({"0": ebb.policies.recompute_all}).apply(model)
        >>> handle.names
        ('0',)
    """

    __module__ = "ebb"  # the public name, also for pickle

    def __init__(
        self,
        policies: Mapping[str, Policy],
        offload: Mapping[str, int] | None = None,
        *,
        ahead: bool = True,
    ) -> None:
        self.policies = {name: _check_policy(policy) for name, policy in policies.items()}
        pages = any(policy._compiled.gives(int(PAGE)) for policy in self.policies.values())
        self._settings = ProcessSettings(dict(offload or {}), ahead, pages)

    def apply(self, model: torch.nn.Module) -> RegionHandles:
        """Make the named modules of a model regions, as ``ebb.apply`` does, and put
        the settings that they need in place.

        Args:
            model: has modules of these names, with or without the parts that wrappers add.

        Returns:
            A handle. Its ``remove()`` undoes all changes; the handle is also a context manager. If
            the model is freed before, its settings end with the next region or the next change of
            ``ebb.config``.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: a module does not exist, or is a region already; nothing is changed.
        """
        handles = RegionHandles([])
        globs = [name for name in self.policies if glob.has_magic(name)]
        if globs and (unknown := sorted(set(globs) - names_of(model))):
            raise ValueError(
                f"ebb: no module matches {shown(unknown[0])}; ModulePolicies takes exact names of "
                "modules, only ebb.apply takes globs"
            )
        try:
            for policy, names in self._groups():
                handle = apply(model, policy, [glob.escape(name) for name in names])
                handles = RegionHandles([*handles._handles, handle])
            self._settings.put(handles._undo)
            # Undo the settings when the model is freed, if the handle was not removed before.
            finalizer = weakref.finalize(model, deferred.defer, handles._undo.close)
            finalizer.atexit = False  # type: ignore[misc]
            handles._undo.callback(finalizer.detach)
        except BaseException:
            handles.remove()
            raise
        return handles

    def __repr__(self) -> str:
        names = ", ".join(in_ranges(name or "the model" for name in self.policies))
        return f"<ebb.ModulePolicies: {names or 'no region'}>"

    def _groups(self) -> list[tuple[Policy, list[str]]]:
        """Each policy, with the names of its modules."""
        groups: dict[str, tuple[Policy, list[str]]] = {}
        for name, policy in self.policies.items():
            groups.setdefault(policy.to_toml(), (policy, []))[1].append(name)
        return list(groups.values())

    def save(self, path: str | Path) -> None:
        """Write the policies to a readable TOML file: one table for each policy, as in a policy's
        file, with ``modules``, the names of its modules.

        Raises:
            OSError: the file cannot be written.
        """
        write_private(path, _HEAD.format(name=Path(path).name) + self._to_toml())

    def _to_toml(self, plan: Mapping[str, object] | None = None) -> str:
        """The policies as TOML, without the comment of a file. `plan`: see `PlanFile`."""
        groups = ((names, policy.to_toml()) for policy, names in self._groups())
        return regions_to_toml(groups, self._settings.offload, self._settings.ahead, plan)

    @classmethod
    def load(cls, path: str | Path) -> ModulePolicies:
        """Read a file that ``save`` or a person wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is invalid; the message says where.
        """
        return cls._load(path)

    @staticmethod
    def _load(path: str | Path, late: bool = False) -> ModulePolicies:
        return ModulePolicies._from_regions(loaded_regions(path, late))

    @staticmethod
    def _parse(text: str, name: str) -> ModulePolicies:
        """See `parsed_regions`."""
        return ModulePolicies._from_regions(parsed_regions(text, name))

    @staticmethod
    def _from_regions(found: Regions) -> ModulePolicies:
        regions, settings, ahead = found
        policies = {
            name: Policy._from_compiled(compiled) for names, compiled in regions for name in names
        }
        return ModulePolicies(policies, settings, ahead=ahead)

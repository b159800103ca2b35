"""``ebb.config``: the settings of the process."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from ebb import _C
from ebb._region import global_state_guard
from ebb._support import deferred
from ebb._support.layers import Layers
from ebb._support.shown import shown
from ebb._support.sizes import (
    bytes_of_rank,
    choice,
    factor,
    folder,
    number_of_bytes,
    whole_number,
)

_T = TypeVar("_T")


class _Setting(Generic[_T]):
    """One setting. `check` returns the value that users read, or raises; C++ has the value that
    `to_native` makes of it."""

    def __init__(
        self,
        check: Callable[[str, Any], _T],
        to_native: Callable[[Any], Any] = lambda value: value,
        from_native: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.check, self.to_native, self.from_native = check, to_native, from_native

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, section: Section, owner: type | None = None) -> _T:
        if section is None:
            return self  # read from the class
        return self.from_native(section._read()[self._name])  # type: ignore[no-any-return]

    def __set__(self, section: Section, value: object) -> None:
        _write({f"{section._name}.{self._name}": value})


class Section:
    """Settings of one feature."""

    _name: str

    @classmethod
    def _settings(cls) -> dict[str, _Setting[Any]]:
        return {name: found for name, found in vars(cls).items() if isinstance(found, _Setting)}

    def _read(self) -> dict[str, Any]:
        """All settings, as C++ has them."""
        deferred.run()
        found: dict[str, Any] = getattr(_C, f"{self._name}_settings")()
        return found

    def _put(self, settings: Mapping[str, Any]) -> None:
        getattr(_C, f"configure_{self._name}")(settings)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._settings():
            raise _unknown(f"{self._name}.{name}", self._settings())
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self._settings():
            self._read()  # raises: the feature was not built
        raise _unknown(f"{self._name}.{name}", self._settings())

    def __repr__(self) -> str:
        settings = (f"{name}={getattr(self, name)!r}" for name in self._settings())
        return f"<ebb.config.{self._name}: {', '.join(settings)}>"


class Ahead(Section):
    """``ebb.config.ahead``: replays ahead. Another thread recomputes values before backward needs
    them.

    While backward works on one outermost region, another thread replays the next one. The tensors
    that autograd saves in the last region are not freed, so backward need not recompute them. Both
    cost memory, at most ``limit``; gradients stay exact. On a device replays run on backward's
    stream, so they hide host time only. ``EBB_AHEAD`` in the environment sets the number of
    regions, or the limit.

    Attributes:
        regions: how many outermost regions ahead of backward. 0, the default: off.
        limit: the most bytes, in the whole process, that are resident before backward needs them. A
            larger region is replayed in part. Default 1 GiB.
    """

    _name = "ahead"
    regions = _Setting(functools.partial(whole_number, unit="regions"))
    limit = _Setting(number_of_bytes)

    def _put(self, settings: Mapping[str, Any]) -> None:
        if settings["regions"]:
            global_state_guard.install()
        super()._put(settings)


class Offload(Section):
    """``ebb.config.offload``: how values with the decision OFFLOAD move to the host and back.

    Attributes:
        min_bytes: smaller storages stay on the device, because small copies cost more than they
            free. Default 1 MiB.
        pinned_limit: the most pinned host memory to use. A value that finds no pinned memory is
            recomputed, or kept if it is an input. Default 16 GiB. A text such as ``"64GiB/node"``
            is for all ranks of a node: each gets an equal part.
        in_flight_bytes: the most bytes in flight to the host, whose device memory is not released
            yet; beyond it the device waits for the first copy. 0: it waits for each copy. Values of
            the last two regions are in flight, so most programs stay below. Default 1 GiB.
        prefetch_bytes: the most bytes to fetch before backward needs them; never more than two
            regions' worth. Default 512 MiB.
        keep_last: how many of the values packed last stay on the device, because backward needs
            them first. Default 0.
        disk: a directory on a fast disk. If pinned memory is full, values move on to a file there.
            Without an accelerator, values move from memory to that file. The file has no name and
            disappears when the process ends. ``""``, the default: no disk.
        disk_limit: the most bytes to use on disk; also per node, as ``pinned_limit``. Default
            64 GiB.
    """

    _name = "offload"
    min_bytes = _Setting(number_of_bytes)
    pinned_limit = _Setting(bytes_of_rank)
    in_flight_bytes = _Setting(number_of_bytes)
    prefetch_bytes = _Setting(number_of_bytes)
    keep_last = _Setting(functools.partial(whole_number, unit="values"))
    disk = _Setting(folder)
    disk_limit = _Setting(bytes_of_rank)


_MODES = ("deferred", "blocking", "assert")
_DEAD_ROWS = ("repeat", "zero", "nan", "none")
_NO_LIMIT = 2**64 - 1


def _limit(name: str, value: object) -> int | None:
    return None if value is None else number_of_bytes(name, value)


class Paging(Section):
    """``ebb.config.paging``: how values with the decision PAGE move to page pools and back. Sizes
    apply to pools that ebb allocates from now on; ``ebb.experimental.paging.reset()`` drops
    existing pools.

    Attributes:
        page_rows: rows of a page. Default 64.
        headroom: the size of a pool, relative to the need of the recorded step; at least 1.
            Default 1.1.
        host_headroom: the size of a pool's second tier, in pinned host memory that kernels address
            directly, as a multiple of the same need. 0, the default: no second tier. If pinned
            memory is missing, the pool has no second tier, and ebb warns.
        device_limit: the most bytes of all pools on one device; pools shrink in proportion.
            ``None``, the default: no limit.
        overflow: what happens if a pool is full. ``"deferred"``, the default: the host does not
            wait, and ``ebb.experimental.paging.step_ok()`` reports the overflow after the step.
            ``"blocking"``: the host waits for each tensor, and the overflow raises
            ``PageOverflowError`` at once; in ``run_step()`` with several processes, after all have
            agreed. ``"assert"``: an assertion on the device.
        dead_rows: the contents of restored padding rows. ``"repeat"``, the default: copies of the
            first valid row, which are as safe to differentiate as that row. ``"zero"``; ``"nan"``;
            or ``"none"``: uninitialised memory. In verify mode (``ebb.verify``, except
            ``"demote"``) always NaN, which reveals a program that depends on padding rows.
        prefetch: the number of layers whose pages are restored ahead of backward, 0 or 1, in steps
            marked by ``ebb.experimental.paging.step()``; -1, the default: 1 on accelerators, 0 on
            the CPU.
    """

    _name = "paging"
    page_rows = _Setting(functools.partial(whole_number, unit="rows", least=1, most=2**31 - 1))
    headroom = _Setting(functools.partial(factor, least=1, most=1000))
    host_headroom = _Setting(functools.partial(factor, least=0, most=1000))
    device_limit = _Setting(
        _limit,
        lambda limit: _NO_LIMIT if limit is None else limit,
        lambda limit: None if limit == _NO_LIMIT else limit,
    )
    overflow = _Setting(functools.partial(choice, choices=_MODES), _MODES.index, _MODES.__getitem__)
    dead_rows = _Setting(
        functools.partial(choice, choices=_DEAD_ROWS), _DEAD_ROWS.index, _DEAD_ROWS.__getitem__
    )
    prefetch = _Setting(functools.partial(whole_number, least=-1, most=1))


_SECTIONS: dict[str, Section] = {"ahead": Ahead(), "offload": Offload(), "paging": Paging()}


def _unknown(name: str, known: Mapping[str, object]) -> AttributeError:
    section, _, setting = name.rpartition(".")
    near = get_close_matches(setting[:100], known, 1)
    whole = f"{section}." if section else ""
    hint = f"did you mean {whole}{near[0]}?" if near else f"valid names: {', '.join(known)}"
    return AttributeError(f"ebb: ebb.config has no {shown(name)}; {hint}")


def _setting(name: str) -> tuple[Section, str]:
    """Where a setting is. `name`: with a dot, or as a keyword with an underscore."""
    section, _, setting = name.partition("." if "." in name else "_")
    if section not in _SECTIONS:
        raise _unknown(section, _SECTIONS)
    known = _SECTIONS[section]._settings()
    if setting not in known:
        raise _unknown(f"{section}.{setting}", known)
    return _SECTIONS[section], setting


def _checked(settings: Mapping[str, object]) -> dict[Section, dict[str, Any]]:
    """The same settings by section, as C++ has them. Raises if one is invalid."""
    found: dict[Section, dict[str, Any]] = {}
    for name, value in settings.items():
        section, setting = _setting(name)
        which = section._settings()[setting]
        found.setdefault(section, {})[setting] = which.to_native(which.check(setting, value))
    return found


def _write(settings: Mapping[str, object]) -> None:
    """Change settings; none if one is invalid."""
    with ExitStack() as undo:
        for section, of_section in _checked(settings).items():
            before = section._read()
            section._put(before | of_section)
            undo.callback(section._put, before)
        undo.pop_all()


_layers = Layers(_write)


def change_until(undo: ExitStack, settings: Mapping[str, object]) -> None:
    """Change settings until `undo` is closed."""
    before = {name: getattr(*_setting(name)) for name in settings}
    _write(settings)
    _layers.add(before, undo)


class _Patch(ContextDecorator, AbstractContextManager[None]):
    def __init__(self, settings: Mapping[str, object]) -> None:
        _checked(settings)
        self._settings = settings
        self._undo: list[ExitStack] = []  # of the blocks that are open

    def __enter__(self) -> None:
        undo = ExitStack()
        change_until(undo, self._settings)
        self._undo.append(undo)

    def __exit__(self, *_: object) -> None:
        self._undo.pop().close()


def _named(settings: Mapping[str, object], keywords: Mapping[str, object]) -> dict[str, object]:
    """The same settings, each under its name with a dot."""
    found = {}
    for name, value in (*settings.items(), *keywords.items()):
        section, setting = _setting(name)
        found[f"{section._name}.{setting}"] = value
    return found


class Config:
    """``ebb.config``: the settings of the process, as in torch's config modules.

    Read or assign an attribute, or change settings for a while with ``patch``. A change counts
    from the next region on. ``EBB_CONFIG`` in the environment gives other values at the start: the
    path of a TOML file with the sections ``[ahead]``, ``[offload]`` and ``[paging]``, or settings
    such as ``EBB_CONFIG="offload.disk=/fast/disk,ahead.regions=1"``. Sizes are numbers of bytes, or
    text such as ``"512MiB"``; they are read as numbers. Assigning an invalid value raises a
    TypeError or ValueError, and an unknown name or a feature that was not built an AttributeError;
    then no setting changes.

    Attributes:
        ahead: replays ahead: ``regions``, ``limit``.
        offload: ``min_bytes``, ``pinned_limit``, ``in_flight_bytes``, ``prefetch_bytes``,
            ``keep_last``, ``disk``, ``disk_limit``.
        paging: ``page_rows``, ``headroom``, ``host_headroom``, ``device_limit``, ``overflow``,
            ``dead_rows``, ``prefetch``.

    Examples:
        >>> ebb.config.offload.in_flight_bytes = "1GiB"
        >>> ebb.config.offload.in_flight_bytes
        1073741824
        >>> with ebb.config.patch(ahead_regions=1, ahead_limit="512MiB"):
        ...     ebb.config.ahead.regions
        1
    """

    ahead: Ahead
    offload: Offload
    paging: Paging

    def __init__(self) -> None:
        vars(self).update(_SECTIONS)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _SECTIONS:
            raise _unknown(name, _SECTIONS)
        settings = ", ".join(_SECTIONS[name]._settings())
        raise AttributeError(f"ebb: ebb.config.{name} has settings; assign one of {settings}")

    def __getattr__(self, name: str) -> Any:
        raise _unknown(name, _SECTIONS)

    def __repr__(self) -> str:
        return f"<ebb.config: {self.to_dict()}>"

    def update(self, settings: Mapping[str, object] | None = None, /, **keywords: object) -> None:
        """Change several settings at once; none if one is invalid.

        Args:
            settings: values by name, such as ``{"offload.min_bytes": "1MiB"}``.
            keywords: the same, with an underscore for the dot: ``offload_min_bytes="1MiB"``.
        """
        _write(_named(settings or {}, keywords))

    def patch(self, settings: Mapping[str, object] | None = None, /, **keywords: object) -> _Patch:
        """A context manager and decorator that changes settings for a while.

        Blocks of several threads may overlap: the block that was entered last counts, for the whole
        process.

        Args:
            settings, keywords: as for ``update``.
        """
        return _Patch(_named(settings or {}, keywords))

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, such as ``"offload.min_bytes"``; sizes in bytes. Features that were
        not built are left out."""
        return {
            f"{section}.{name}": getattr(settings, name)
            for section, settings in _SECTIONS.items()
            if section in _C.plugins
            for name in settings._settings()
        }


config = Config()

if "ahead" in _C.plugins:
    # Ends the workers while the interpreter exists, because a replay may need it.
    atexit.register(_C.end_ahead)
    # Runs before Python takes locks for the fork, because ending a worker releases the GIL.
    os.register_at_fork(before=_C.stop_ahead)

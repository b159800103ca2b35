"""Settings of the process that go with policies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ebb import ahead, offload
from ebb._plan.pages import size_pools_anew


@dataclass(frozen=True)
class ProcessSettings:
    """What else is set while policies are in place.

    Attributes:
        offload: settings of :func:`ebb.offload.configure`; empty: as they are.
        ahead: whether replays run ahead of backward as they are set to; else they do not.
        pages: whether rows go to page pools, which are sized anew.
    """

    offload: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = True
    pages: bool = False

    def put(self, undo: ExitStack) -> None:
        """They are in place until `undo` is closed."""
        if self.offload:
            undo.callback(offload.configure, **offload.settings())
            offload.configure(**self.offload)  # type: ignore[arg-type]
        if not self.ahead:
            undo.callback(ahead.configure, regions=ahead.settings()["regions"])
            ahead.configure(regions=0)
        if self.pages:
            size_pools_anew()
            undo.callback(size_pools_anew)

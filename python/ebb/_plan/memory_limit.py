"""How much memory a job may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ebb._support import devices
from ebb._support.shown import shown
from ebb._support.sizes import number_of_bytes

_SHARE = 0.9  # of what there is, which may be in use
_CGROUP = "/sys/fs/cgroup"
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of versions 2 and 1
_NONE = 2**60  # what version 1 says of no limit is above


@dataclass(frozen=True)
class Limit:
    """How much may be in use.

    Attributes:
        given: bytes; None: a share of the memory that there is. ebb asks the device for that when
            it first meets a model, and no earlier: asking initialises the device, and a process
            that has done so cannot fork workers.
    """

    given: int | None = None

    def nbytes(self, device: torch.device) -> int:
        """In bytes.

        Args:
            device: on which the blocks compute.

        Raises:
            ValueError: nothing tells how much memory there is.
        """
        return self.given or int(_SHARE * there_is(device))


def limit_of(text: str) -> Limit | None:
    """What ``auto`` and ``auto:20GiB`` say; None if the text is neither.

    Raises:
        ValueError: it is no size.
    """
    kind, colon, given = text.partition(":")
    if kind.strip().lower() != "auto":
        return None
    if colon:
        limit = number_of_bytes("a limit", given)
        if limit == 0:
            raise ValueError(f"ebb: a limit must be more than 0 bytes; got {shown(text)}")
        return Limit(limit)
    return Limit()


def there_is(device: torch.device, root: str = _CGROUP) -> int:
    """Bytes of memory that the job has: of its accelerator, if it computes there or has begun to
    use it; else of its control group, else of the machine.

    Raises:
        ValueError: nothing tells.
    """
    accelerator = devices.in_use() if device.type == "cpu" else device
    if (has := devices.memory_of(accelerator)) is not None:
        return has
    found = [_number_in(Path(root, name)) for name in _LIMITS]
    limits = [limit for limit in found if 0 < limit < _NONE]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    if not limits:
        raise ValueError("ebb: nothing tells how much memory there is; write auto:20GiB, say")
    return min(limits)


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return 0

"""How much memory a job may use."""

from __future__ import annotations

from pathlib import Path

import torch

from ebb._support.shown import shown
from ebb._support.sizes import number_of_bytes

_SHARE = 0.9  # of what there is, which may be in use
_CGROUP = "/sys/fs/cgroup"
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of versions 2 and 1
_NONE = 2**60  # what version 1 says of no limit is above


def limit_of(text: str) -> int | None:
    """What ``auto`` and ``auto:20GiB`` allow to be in use, in bytes; None if the text is neither.

    Raises:
        ValueError: it is no size, or there is no limit to be found.
    """
    kind, colon, given = text.partition(":")
    if kind.strip().lower() != "auto":
        return None
    if colon:
        limit = number_of_bytes("a limit", given)
        if limit == 0:
            raise ValueError(f"ebb: a limit must be more than 0 bytes; got {shown(text)}")
        return limit
    return int(_SHARE * there_is())


def there_is(root: str = _CGROUP) -> int:
    """Bytes of memory that the job has: of its accelerator, else of its control group, else of the
    machine.

    Raises:
        ValueError: nothing tells.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
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

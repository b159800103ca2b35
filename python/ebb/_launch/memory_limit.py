"""How much memory a job may use. In: a device, and the text of ``auto``. Out: bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ebb._support import devices
from ebb._support.shown import shown
from ebb._support.sizes import number_of_bytes

_SHARE = 0.9  # share of the available memory that the job may use
_CGROUPS = "/sys/fs/cgroup"
_OWN_CGROUPS = "/proc/self/cgroup"
_NONE = 2**60  # version 1 reports larger numbers if there is no limit


@dataclass(frozen=True)
class Limit:
    # Bytes; None: a share of the available memory. ebb asks the device for its memory only when a
    # model first runs: asking initialises the device, and after that a process cannot fork workers.
    given: int | None = None

    def nbytes(self, device: torch.device) -> int:
        """The limit in bytes, if blocks compute on `device`. Raises the errors of `there_is`."""
        return self.given or int(_SHARE * there_is(device))


def limit_of(text: str) -> Limit | None:
    """Parse ``auto`` and ``auto:20GiB``; None if the text is neither. Raises ValueError if the part
    after the colon is no valid size."""
    kind, colon, given = text.partition(":")
    if kind.strip().lower() != "auto":
        return None
    if not colon:
        return Limit()
    if limit := number_of_bytes("a limit", given):
        return Limit(limit)
    raise ValueError(f"ebb: the limit after `auto:` must be more than 0 bytes; got {shown(text)}")


def there_is(device: torch.device, root: str = _CGROUPS, own: str = _OWN_CGROUPS) -> int:
    """Bytes that the job may use. If the job computes on an accelerator, or has begun to use one:
    that device's memory, less what other processes use. Else the smallest of the limits of the
    process's control groups and the machine's memory. Raises ValueError if neither is known."""
    if (memory := devices.memory_of(_where(device))) is not None:
        return memory[0]
    limits = [limit for limit, _ in _control_groups(root, own)]
    if total := _in_meminfo("MemTotal:"):
        limits.append(total)
    if not limits:
        raise ValueError(
            "ebb: cannot find out how much memory this machine has; give the limit, for example "
            "auto:20GiB"
        )
    return min(limits)


def free(device: torch.device) -> int:
    """Bytes that a job on `device` can still allocate; 0 if unknown."""
    if (memory := devices.memory_of(_where(device))) is not None:
        return memory[1]
    sizes = [_in_meminfo("MemAvailable:")]
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        sizes.append(most - pages * resource.getpagesize())
    sizes += [limit - used for limit, used in _control_groups(_CGROUPS, _OWN_CGROUPS)]
    return max(0, min(sizes))


def _where(device: torch.device) -> torch.device:
    """The device that computes: a model in host memory may compute on the accelerator."""
    return (devices.in_use() or device) if device.type == "cpu" else device


def _control_groups(root: str, own: str) -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of each control group with a limit that the process is in. In a
    container, the folder `root` may be the container's own group."""
    for line in _lines_of(own):  # "4:memory:/a/b" in version 1, "0::/a/b" in version 2
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = Path(root), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = Path(root, "memory")
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(mount.parts)]):
            limit, used = (_number_in(folder / file) for file in files)
            if 0 < limit < _NONE:
                yield limit, used


def _in_meminfo(key: str) -> int:
    lines = _lines_of("/proc/meminfo")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return 0

"""Ranks compare the collectives that replays of a region repeat."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_GLOO: Any = getattr(dist, "ProcessGroupGloo", ())  # torch may be built without gloo
_SECONDS_BETWEEN_SENDS = 0.5
_TAG = 2**31 - 10  # of the sends in `_has`; programs use other tags


class _Group:
    """The lists of collectives that the ranks of one process group have compared."""

    def __init__(self) -> None:
        self.agreed: dict[str, set[str]] = {}  # for each region: lists that all ranks have
        self.compared: Counter[str] = Counter()  # comparisons in verify mode, for each region


_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


def compare(group_name: str, region: str, collectives: str, always: bool) -> str:
    """Compare this rank's list with those of the group's other ranks, through the group's store.

    Args:
        group_name: name of the process group.
        region: name of the region.
        collectives: names of the operators, in the order of the forward.
        always: also compare a list that the ranks have compared before.

    Returns:
        Why the ranks cannot repeat the collectives; empty if the lists are the same.
    """
    distributed: Any = dist.distributed_c10d
    try:
        group = distributed._resolve_process_group(group_name)
    except (RuntimeError, ValueError):
        return _in_words(region, "their process group was destroyed after the forward")
    known = _groups.setdefault(group, _Group())
    agreed = known.agreed.setdefault(region, set())
    if collectives in agreed and not always:
        return ""
    store = distributed._get_process_group_store(group)
    is_alone = dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"
    if store is None or is_alone:
        return ""
    key = f"{region}/{len(agreed)}"
    if always:
        key = f"{region}/verify/{known.compared[region]}"
    why = _compare(group, store, f"ebb/collectives/{group_name}", key, collectives)
    if why:
        return _in_words(region, why)
    agreed.add(collectives)
    if always:
        known.compared[region] += 1
    return ""


def _compare(group: Any, store: Any, prefix: str, key: str, collectives: str) -> str:
    peers = dist.distributed_c10d.PrefixStore(prefix, store)
    peers.set(f"{key}/{dist.get_rank(group)}", collectives)
    deadline = time.monotonic() + _timeout_of(group).total_seconds()
    for other in range(dist.get_world_size(group)):
        rank = dist.get_global_rank(group, other)
        if not _has(peers, f"{key}/{other}", deadline, group, other):
            return f"rank {rank} did not reach this point"
        found = peers.get(f"{key}/{other}").decode()
        if found != collectives:
            return f"rank {rank} repeats other collectives ({found})"
    return ""


# Note [Waiting for the lists of other ranks]
# A rank polls the store. `Store.wait` would block other threads that use the connection, and a
# connection of its own can only be made while the process that has the store is alive. The store
# does not know that a rank has ended, but gloo does: a send to that rank raises the same error as a
# collective, at once. No rank receives what is sent here, so each send leaves a few bytes in gloo.
# NCCL's collectives wait for the timeout as well.
def _has(peers: Any, key: str, deadline: float, group: Any, other: int) -> bool:
    """True if the key is there in time.

    Raises:
        RuntimeError: the rank has ended.
    """
    pause, next_send = 1e-4, time.monotonic() + _SECONDS_BETWEEN_SENDS
    while not peers.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if time.monotonic() > next_send:
            next_send += _SECONDS_BETWEEN_SENDS
            for backend in _backends(group):
                if isinstance(backend, _GLOO):
                    backend.send([torch.zeros(1)], other, _TAG)
    return True


def _backends(group: Any) -> Iterator[Any]:
    for device in group._device_types:
        with suppress(RuntimeError):  # none for this device
            yield group._get_backend(device)


def _timeout_of(group: Any) -> timedelta:
    """How long a collective of the group waits for other ranks."""
    for backend in _backends(group):
        with suppress(AttributeError):  # another backend
            timeout: timedelta = backend.options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def _in_words(region: str, why: str) -> str:
    return (
        f"ebb: cannot recompute the collectives of region {region!r}: {why}. All ranks must run "
        "the same regions, with the same policy, and their backward in the same order. Or use a "
        "policy that keeps the results of collectives."
    )

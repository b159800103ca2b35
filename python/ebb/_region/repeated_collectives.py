"""Ranks compare the collectives that replays of a region repeat."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEPT = 2  # comparisons whose keys stay in the store, since other ranks may still read them

_numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # by group name


def compare(group_name: str, region: str, collectives: str) -> str:
    """Compare this rank's list with those of the group's other ranks, through the group's store.

    Args:
        group_name: name of the process group.
        region: name of the region.
        collectives: names of the operators, in the order of the forward.

    Returns:
        Why the ranks cannot repeat the collectives; empty if the lists are the same.
    """
    distributed: Any = dist.distributed_c10d
    group = distributed._resolve_process_group(group_name)
    store = distributed._get_process_group_store(group)
    if store is None or dist.get_world_size(group) == 1:
        return ""
    rank, number = dist.get_rank(group), next(_numbers[group_name])
    own = f"{region}\n{collectives}"
    # A connection of its own: a waiting connection blocks other threads.
    peers = distributed.PrefixStore(f"ebb/collectives/{group_name}", store.clone())
    peers.set_timeout(_timeout_of(group))
    if number >= _KEPT:
        peers.delete_key(f"{number - _KEPT}/{rank}")
    peers.set(f"{number}/{rank}", own)
    for other in range(dist.get_world_size(group)):
        try:
            found = peers.get(f"{number}/{other}").decode()
        except RuntimeError:
            return _in_words(region, f"rank {other} of the process group did not reach this point")
        if found != own:
            theirs = ", then ".join(found.split("\n")).strip()
            return _in_words(
                region,
                f"rank {other} of the process group repeats other collectives (region {theirs})",
            )
    return ""


def _timeout_of(group: Any) -> timedelta:
    """How long a collective of the group waits for other ranks."""
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):  # another backend, or none for this device
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def _in_words(region: str, why: str) -> str:
    return (
        f"ebb: cannot recompute the collectives of region {region!r}: {why}. All ranks must run "
        "the same regions, with the same policy, and their backward in the same order. Or use a "
        "policy that keeps the results of collectives."
    )

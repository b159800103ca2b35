"""Exchanges values among the ranks of a process group, through the group's store."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

import torch.distributed as dist

_FIELD = 20  # bits of each of three counts in one number: ranks, ranks with a value, flags
_MOST_VALUES = 64  # values that a rank leaves in the store

Values = list[tuple[int, Any]]  # ranks of the group, with the value of each
Outcome = tuple[bool, Values]  # True if any rank has set the flag; and the values


# Note [Ranks exchange values through a store]
# Ranks do not use collectives: a rank that has raised or trains nothing takes no part, so the
# others would hang, or the backend would match the collective with another one of the program.
#
# Ranks read each other's values one by one, or they gather them: ranks are counted, and the last
# one publishes the outcome, so that a rank without a value makes two calls of the store.
#
# Values are JSON. Keys are deleted when no rank reads them any more:
# * A rank deletes its own value after _MOST_VALUES others. By then all ranks have read the value,
#   since each has taken part in almost as many exchanges.
# * The first rank in a `gather` deletes the count and the outcome of the one before the last. All
#   ranks have joined the last one, so all have read the outcome of the one before.
class StoreExchange:
    """Exchanges values among the ranks of a group, for one purpose. Only `gather` waits."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self.store: Any = dist.distributed_c10d.PrefixStore(prefix, store)
        self.rank, self.size = rank, size
        self.rounds = itertools.count()  # for keys; ranks take equal numbers in the same order
        self._own: deque[str] = deque()  # keys of this rank's values in the store
        self._gathered: deque[str] = deque(maxlen=2)  # keys of this rank's last gathers

    def read(self, key: str) -> Any:
        """The value of a key; None if the store has none."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def put(self, key: str, value: Any) -> None:
        """Write this rank's value for `key`."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        self._own.append(f"{key}/{self.rank}")
        if len(self._own) > _MOST_VALUES:
            self._delete(self._own.popleft())

    def values(self, key: str, ranks: Iterable[int]) -> Values:
        """The values for `key` of those `ranks` that have written one."""
        found = [(rank, self.read(f"{key}/{rank}")) for rank in ranks]
        return [(rank, value) for rank, value in found if value is not None]

    def give(self, key: str, expected: int, value: Any, flag: bool = False) -> Outcome | None:
        """Take part in a `gather` without waiting. Returns the outcome if this rank is the last."""
        if value is not None:
            self.put(key, value)
        total = self.store.add(key, 1 | (value is not None) << _FIELD | flag << 2 * _FIELD)
        count, given, flags = ((total >> n * _FIELD) % 2**_FIELD for n in range(3))
        if count == 1 and len(self._gathered) == 2:
            self._delete(self._gathered[0])
            self._delete(f"{self._gathered[0]}/all")
        if count < expected:
            return None
        outcome = flags > 0, self.values(key, range(self.size)) if given else []
        self.store.set(f"{key}/all", json.dumps(outcome))
        return outcome

    def gather(self, key: str, expected: int, value: Any, flag: bool, what: str) -> Outcome:
        """Wait for the outcome of `expected` ranks. A value of None means that a rank has none.
        Raises RuntimeError, which ends with `what`, if ranks have not come in the store's time."""
        outcome = self.give(key, expected, value, flag)
        try:
            outcome = outcome or cast(Outcome, json.loads(self.store.get(f"{key}/all")))
        except RuntimeError as error:
            count: object = "not all"
            with suppress(RuntimeError):
                count = self.store.add(key, 0) % 2**_FIELD
            raise RuntimeError(
                f"ebb: rank {self.rank} timed out: {count} of {expected} {what}"
            ) from error
        self._gathered.append(key)
        return outcome

    def _delete(self, key: str) -> None:
        with suppress(RuntimeError):  # a store that cannot delete
            self.store.delete_key(key)


def exchange_of(group: Any, prefix: str, *, waiting: str = "") -> StoreExchange | None:
    """None if the group has no other ranks, or no store. `waiting` names the functions that call
    `gather`: a connection that waits blocks other threads, so these get one of their own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0 or size == 1 or dist.get_backend(group) == "fake":  # "fake" has no other processes
        return None
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    if waiting:
        if store is None:
            raise NotImplementedError(
                f"ebb: {waiting} need a process group with a store, which the backend "
                f"{dist.get_backend(group)} does not have. Pass group=, a group with the backend "
                "gloo or nccl."
            )
        timeout, store = store.timeout, store.clone()
        store.set_timeout(timeout)  # some stores' clones lose it
    return None if store is None else StoreExchange(store, prefix, rank, size)

"""Ranks compare the collectives that replays of a region repeat."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

_GLOO: Any = getattr(dist, "ProcessGroupGloo", ())  # torch may be built without gloo
_SECONDS_BETWEEN_SENDS = 0.5
_SECONDS_BETWEEN_QUESTIONS = 0.2
_TAG = 2**31 - 10  # of the sends in `_beside`; programs use other tags
_MOST_PLACES = 10_000  # lists that a rank remembers, for other ranks that are behind
_MOST_ANSWERS = 64  # lists that a rank leaves in the store


# Note [Lists that change later]
# A rank compares each new list before it repeats the list, so it waits for the lists of the other
# ranks. If only this rank's list has changed, the others do not compare: they wait in the first
# collective, or they repeat nothing and go on. So each rank remembers the lists of its last
# regions, and a thread looks for questions of other ranks. A rank that waits puts the place of its
# list and the list itself into the store, as "asked". If another rank has another list at that
# place, its thread answers, and both ranks raise. If the lists are the same, the other rank answers
# when its backward gets there, since it must take part in the collectives. Empty lists need no
# backward, so the thread answers at once.
#
# The rank that waits in a collective learns of the problem from its own thread. ebb can end the
# wait only for operators of c10d on the CPU. In other cases that rank waits as for any rank that
# has failed.
class _Ranks:
    """What the ranks of one process group have told each other. `peers` is None if it is alone."""

    def __init__(self, group_name: str, group: Any) -> None:
        self.rank = dist.get_rank(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.peers = _store_of(group_name, group)
        self.regions = 0
        self.agreed: set[str] = set()  # lists that all ranks had at the same place
        self.waits_at = ""  # the place at which this rank waits for the other ranks' lists
        self.asks = False  # this rank's question may be in the store
        self.is_lost = False  # the store is gone
        self.lock = threading.Lock()  # guards the members below
        self.lists: dict[str, tuple[str, str]] = {}  # for each place: region and list
        self.answered: set[str] = set()  # places of the lists that other ranks could read
        self.in_store: deque[str] = deque()  # those that are still in the store
        self.problems: dict[str, str] = {}  # places at which ranks differ, and how
        self.untold: set[str] = set()  # places of problems that this rank has not raised

    def remember(self, place: str, region: str, collectives: str) -> None:
        with self.lock:
            self.lists[place] = region, collectives
            if len(self.lists) > _MOST_PLACES:
                oldest = next(iter(self.lists))
                del self.lists[oldest]
                self.answered.discard(oldest)

    def answer(self, place: str, collectives: str) -> None:
        """Put this rank's list where other ranks look for it."""
        with self.lock:
            if place in self.answered:
                return
            self.peers.set(f"{place}/{self.rank}", collectives)
            self.answered.add(place)
            self.in_store.append(place)
            if len(self.in_store) > _MOST_ANSWERS:
                # All ranks have read it: each has made almost as many comparisons since.
                with suppress(RuntimeError):  # a store that cannot delete
                    self.peers.delete_key(f"{self.in_store.popleft()}/{self.rank}")

    def ask(self, place: str) -> None:
        self.asks = True
        self.peers.set("asked", json.dumps([self.rank, place, *self.lists[place]]))

    def withdraw(self) -> None:
        """The question is over, or this rank waits no longer."""
        if self.asks:
            self.asks = False
            self.peers.set("asked", "null")

    def look_for_questions(self) -> None:
        """Answer the last question, if this rank has another list, or an empty one."""
        if not self.peers.check(["asked"]):
            return
        question = json.loads(self.peers.get("asked"))
        if question is None:
            return
        asker, place, region, theirs = question
        waits_at = self.waits_at
        mine = self.lists.get(place, ("", None))[1]
        if asker == self.rank or mine is None or place in self.answered:
            return
        if mine != theirs:
            self.differ(place, region, asker, mine, theirs)
        elif mine and waits_at not in ("", place):
            rank = self.global_ranks[asker]
            self.has_problem(place, region, f"rank {rank} repeats them before others")
            self.ask(waits_at)  # so that the other rank learns the same
        if mine != theirs or not mine:
            self.answer(place, mine)

    def differ(self, place: str, region: str, other: int, mine: str, theirs: str) -> None:
        rank = self.global_ranks[other]
        why = f"rank {rank} repeats other collectives ({_short(theirs)}; this rank: {_short(mine)})"
        self.has_problem(place, region, why)

    def has_problem(self, place: str, region: str, why: str) -> None:
        with self.lock:
            if place not in self.problems:
                self.problems[place] = _in_words(region, why)
                self.untold.add(place)

    def take_problem(self, place: str = "") -> str:
        """A problem that this rank has not raised, or the one at `place`; empty: there is none."""
        with self.lock:
            if place in self.problems:
                self.untold.discard(place)
                return self.problems[place]
            return self.problems[self.untold.pop()] if self.untold else ""

    def compare(self, place: str, group: Any) -> str:
        """Wait for the other ranks' lists at `place`. Returns the first difference."""
        region, mine = self.lists[place]
        self.answer(place, mine)
        missing = set(range(len(self.global_ranks)))
        beside = _beside(self, place, group, missing)
        pause = 1e-4
        while not (why := self.take_problem(place)):
            for other in sorted(missing):
                if self.peers.check([f"{place}/{other}"]):
                    missing.remove(other)
                    theirs = self.peers.get(f"{place}/{other}").decode()
                    if theirs != mine:
                        self.differ(place, region, other, mine, theirs)
            if not missing:
                why = self.take_problem(place)
                break
            if not next(beside):
                self.withdraw()
                late = self.global_ranks[min(missing)]
                return _in_words(region, f"rank {late} did not reach this point")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if not why:
            self.withdraw()
            self.agreed.add(mine)
        return why


# Note [Waiting for the lists of other ranks]
# A rank polls the store. `Store.wait` would block other threads that use the connection, and a
# connection of its own can only be made while the process that has the store is alive. The store
# does not know that a rank has ended, but gloo does: a send to that rank raises the same error as a
# collective, at once. No rank receives what is sent here, so each send leaves a few bytes in gloo.
# NCCL's collectives wait for the timeout as well.
def _beside(ranks: _Ranks, place: str, group: Any, missing: set[int]) -> Iterator[bool]:
    """What a rank does while it waits for `missing`: it asks them, and sends something to them.

    Yields:
        False when the rank has waited for as long as a collective would.

    Raises:
        RuntimeError: another rank has ended.
    """
    now = time.monotonic()
    deadline = now + _timeout_of(group).total_seconds()
    next_send = now + _SECONDS_BETWEEN_SENDS
    next_question = now + _SECONDS_BETWEEN_QUESTIONS
    while True:
        now = time.monotonic()
        if now > next_question:
            next_question = now + _SECONDS_BETWEEN_QUESTIONS
            ranks.look_for_questions()  # the next line overwrites the question of another rank
            ranks.ask(place)
        if now > next_send:
            next_send = now + _SECONDS_BETWEEN_SENDS
            gloo = [backend for backend in _backends(group) if isinstance(backend, _GLOO)]
            for backend in gloo:
                for other in missing:
                    backend.send([torch.zeros(1)], other, _TAG)
        yield now < deadline


_ranks: weakref.WeakKeyDictionary[Any, _Ranks] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards `_ranks`


def _find(group_name: str) -> tuple[Any, _Ranks] | None:
    """The process group; None if it was destroyed."""
    distributed: Any = dist.distributed_c10d
    try:
        group = distributed._resolve_process_group(group_name)
    except (RuntimeError, ValueError):
        return None
    with _lock:
        if group not in _ranks:
            _ranks[group] = _Ranks(group_name, group)
        return group, _ranks[group]


def number(group_name: str) -> int:
    """The number of a new region with collectives that replays may repeat."""
    found = _find(group_name)
    if found is None:
        return 0
    found[1].regions += 1
    return found[1].regions


def tell(group_name: str, region: str, place: str, collectives: str) -> bool:
    """Remember a region's list, to answer other ranks.

    Args:
        group_name: name of the process group.
        region: name of the region.
        place: which list of the group it is; the same on all ranks.
        collectives: names of the operators, in the order of the forward.

    Returns:
        True if the ranks have not compared such a list before.
    """
    found = _find(group_name)
    if found is None or found[1].peers is None:
        return False
    found[1].remember(place, region, collectives)
    _listener.start()
    return collectives not in found[1].agreed


def compare(group_name: str, region: str, place: str, collectives: str, always: bool) -> str:
    """Compare this rank's list with those of the group's other ranks, through the group's store.

    Args:
        group_name: name of the process group.
        region: name of the region.
        place: which list of the group it is; the same on all ranks.
        collectives: names of the operators, in the order of the forward.
        always: also compare a list that the ranks have compared before.

    Returns:
        Why the ranks cannot repeat the collectives; empty if the lists are the same.
    """
    found = _find(group_name)
    if found is None:
        return _in_words(region, "their process group was destroyed after the forward")
    group, ranks = found
    if ranks.peers is None:
        return ""
    ranks.remember(place, region, collectives)
    why = ranks.take_problem(place)
    if not why and (always or collectives not in ranks.agreed):
        ranks.waits_at = place
        try:
            why = ranks.compare(place, group)
        finally:
            ranks.waits_at = ""
    return why


def problem(group_name: str) -> str:
    """Why another rank does not take part in a collective; empty if this rank knows nothing."""
    found = _find(group_name)
    return "" if found is None else found[1].take_problem()


class _Listener:
    """The thread that answers other ranks. See Note [Lists that change later]."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.stopped = threading.Event()

    def start(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="ebb-ranks", daemon=True)
            self.thread.start()

    def run(self) -> None:
        while not self.stopped.wait(_SECONDS_BETWEEN_QUESTIONS):
            with _lock:
                all_ranks = [ranks for ranks in _ranks.values() if ranks.peers is not None]
            for ranks in all_ranks:
                if not ranks.is_lost:
                    try:
                        ranks.look_for_questions()
                    except RuntimeError:  # the process that has the store has ended
                        ranks.is_lost = True
            del all_ranks

    def stop(self) -> None:
        """End the thread while the interpreter exists."""
        self.stopped.set()
        if self.thread is not None:
            self.thread.join(timeout=1)


_listener = _Listener()


def _after_fork() -> None:
    global _listener, _lock
    _listener, _lock = _Listener(), threading.Lock()


atexit.register(lambda: _listener.stop())
os.register_at_fork(after_in_child=_after_fork)


def _store_of(group_name: str, group: Any) -> Any:
    distributed: Any = dist.distributed_c10d
    store = distributed._get_process_group_store(group)
    is_alone = dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"
    if store is None or is_alone:
        return None
    return distributed.PrefixStore(f"ebb/collectives/{group_name}", store)


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


def _short(collectives: str) -> str:
    """A list with numbers in place of repetitions."""
    runs = [(name, len(list(run))) for name, run in groupby(collectives.split(", "))]
    return ", ".join(f"{count} x {name}" for name, count in runs) if collectives else "none"


def _in_words(region: str, why: str) -> str:
    return (
        f"ebb: cannot recompute the collectives of region {region!r}: {why}. All ranks must run "
        "the same regions, with the same policy, and their backward in the same order. Or use a "
        "policy that keeps the results of collectives."
    )

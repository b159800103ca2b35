"""Ranks compare the collectives that replays of a region repeat."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from ebb._support.store_exchange import StoreExchange, exchange_of

_GLOO: Any = getattr(dist, "ProcessGroupGloo", ())  # torch may be built without gloo
_SECONDS_BETWEEN_SENDS = 0.5
_SECONDS_BETWEEN_QUESTIONS = 0.2
_TAG = 2**31 - 10  # of the sends in `_send_to`; programs use other tags
_MOST_PLACES = 10_000  # lists that a rank remembers, for other ranks that are behind


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
    """The lists of collectives that the ranks of one process group have exchanged."""

    def __init__(self, exchange: StoreExchange, group: Any) -> None:
        self.exchange = exchange
        self.global_ranks = dist.get_process_group_ranks(group)
        self.agreed: set[str] = set()  # lists that all ranks had at the same place
        self.waits_at = ""  # the place at which this rank waits for the other ranks' lists
        self.asks = False  # this rank's question may be in the store
        self.is_lost = False  # the store is gone
        self.lock = threading.Lock()  # guards the members below
        self.lists: dict[str, tuple[str, str]] = {}  # for each place: region and list
        self.answered: set[str] = set()  # places of the lists that other ranks could read
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
            if place not in self.answered:
                self.exchange.put(place, collectives)
                self.answered.add(place)

    def ask(self, place: str) -> None:
        self.asks = True
        question = [self.exchange.rank, place, *self.lists[place]]
        self.exchange.store.set("asked", json.dumps(question))

    def withdraw(self) -> None:
        """The question is over, or this rank waits no longer."""
        if self.asks:
            self.asks = False
            self.exchange.store.set("asked", "null")

    def look_for_questions(self) -> None:
        """Answer the last question, if this rank has another list, or an empty one."""
        question = self.exchange.read("asked")
        if question is None:
            return
        asker, place, region, theirs = question
        waits_at = self.waits_at
        mine = self.lists.get(place, ("", None))[1]
        if asker == self.exchange.rank or mine is None or place in self.answered:
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

    # Note [Waiting for the lists of other ranks]
    # A rank polls the store. `Store.wait` would block other threads that use the connection, and a
    # connection of its own can only be made while the process that has the store is alive. The
    # store does not know that a rank has ended, but gloo does: a send to that rank raises the same
    # error as a collective, at once. No rank receives what is sent here, so each send leaves a few
    # bytes in gloo. NCCL's collectives wait for the timeout as well.
    def compare(self, place: str, group: Any) -> str:
        """Wait for the other ranks' lists at `place`, as long as a collective would. Returns the
        first difference; raises RuntimeError if another rank has ended."""
        region, mine = self.lists[place]
        self.answer(place, mine)
        missing = set(range(self.exchange.size)) - {self.exchange.rank}
        now = time.monotonic()
        deadline = now + _timeout_of(group).total_seconds()
        next_send = now + _SECONDS_BETWEEN_SENDS
        next_question = now + _SECONDS_BETWEEN_QUESTIONS
        pause = 1e-4
        while True:
            for other, theirs in self.exchange.values(place, sorted(missing)):
                missing.remove(other)
                if theirs != mine:
                    self.differ(place, region, other, mine, theirs)
            if why := self.take_problem(place):
                return why
            if not missing:
                self.withdraw()
                self.agreed.add(mine)
                return ""
            now = time.monotonic()
            if now > next_question:
                next_question = now + _SECONDS_BETWEEN_QUESTIONS
                self.look_for_questions()  # the next line overwrites the question of another rank
                self.ask(place)
            if now > next_send:
                next_send = now + _SECONDS_BETWEEN_SENDS
                _send_to(missing, group)
            if now >= deadline:
                self.withdraw()
                late = self.global_ranks[min(missing)]
                return _in_words(region, f"rank {late} did not reach this point")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


# By process group; None for a group whose other ranks this process cannot reach, if it has any.
_ranks: weakref.WeakKeyDictionary[Any, _Ranks | None] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards `_ranks`


def _find(group_name: str) -> tuple[Any, _Ranks | None]:
    """The process group, None if it was destroyed; and its ranks."""
    distributed: Any = dist.distributed_c10d
    try:
        group = distributed._resolve_process_group(group_name)
    except (RuntimeError, ValueError):
        return None, None
    with _lock:
        if group not in _ranks:
            exchange = exchange_of(group, f"ebb/collectives/{group_name}")
            _ranks[group] = None if exchange is None else _Ranks(exchange, group)
        return group, _ranks[group]


# The C++ part calls the next four functions. `CollectivesOfRanks` in
# src/plugins/collectives/ranks.h describes the arguments.
def number(group_name: str) -> int:
    """The number of a new region with collectives that replays may repeat."""
    _, ranks = _find(group_name)
    return 0 if ranks is None else next(ranks.exchange.rounds)


def tell(group_name: str, region: str, place: str, collectives: str) -> bool:
    """Remember a list, to answer other ranks. True if the ranks have not compared such a list."""
    _, ranks = _find(group_name)
    if ranks is None:
        return False
    ranks.remember(place, region, collectives)
    with _lock:
        if _listener.ident is None:
            _listener.start()
    return collectives not in ranks.agreed


def compare(group_name: str, region: str, place: str, collectives: str, always: bool) -> str:
    """Why the ranks cannot repeat a list; empty if all ranks have the same."""
    group, ranks = _find(group_name)
    if group is None:
        return _in_words(region, "their process group was destroyed after the forward")
    if ranks is None:
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
    _, ranks = _find(group_name)
    return "" if ranks is None else ranks.take_problem()


class _Listener(threading.Thread):
    """Answers other ranks. See Note [Lists that change later]."""

    def __init__(self) -> None:
        super().__init__(name="ebb-ranks", daemon=True)
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(_SECONDS_BETWEEN_QUESTIONS):
            with _lock:
                all_ranks = [ranks for ranks in _ranks.values() if ranks is not None]
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
        if self.is_alive():
            self.join(timeout=1)


_listener = _Listener()


def _after_fork() -> None:
    global _listener, _lock
    _listener, _lock = _Listener(), threading.Lock()


atexit.register(lambda: _listener.stop())
os.register_at_fork(after_in_child=_after_fork)


def _backends(group: Any) -> Iterator[Any]:
    for device in group._device_types:
        with suppress(RuntimeError):  # none for this device
            yield group._get_backend(device)


def _send_to(ranks: Iterable[int], group: Any) -> None:
    """See Note [Waiting for the lists of other ranks]."""
    for backend in _backends(group):
        for rank in ranks if isinstance(backend, _GLOO) else ():
            backend.send([torch.zeros(1)], rank, _TAG)


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

"""One plan for all ranks of a job."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ebb._support.log import log

# The ends of steps, counted from a job's first, at which ranks speak with each other.
MEETINGS = (16, 32, 64)
_ASKS = 4  # in how many steps a rank asks once whether another one begins to measure
_WAIT = timedelta(seconds=30)  # for ranks that are somewhere else, and for one that plans: twice
_sessions = itertools.count()


# Note [Ranks that agree]
# Ranks meet in the store of the default process group, not by collectives: a rank that trains
# nothing never comes, and others must not hang for it. They meet at the end of a step whose number
# was fixed before, whatever each has measured by then: a rank that waited for another earlier might
# wait for one that stands in a collective of the next step, which needs both. Each waiting ends
# after a time; who waited in vain plans for itself, so plans may differ then. That costs memory or
# time on a rank, and no bits.
#
# Ranks whose blocks and operators are the same (data parallelism) are one kind, and get the plan
# that the one makes which needs most; with the most of what any of them measured. Stages of a
# pipeline are of different kinds.
#
# Where all is kept until one of them has no more room, that one writes down the step from which on
# all measure, as many steps ahead as a rank may be: hosts do not wait for what devices do. A rank
# that sees it too late counts from that step nevertheless, and so comes to the same meetings.


@dataclass(frozen=True)
class Offer:
    """What a rank has measured.

    Attributes:
        kind: of ranks, which is the same where one plan fits.
        peak: of the step that was recorded.
        budget: bytes, or a share. The plan of a kind is made for the least.
        duration, base: as in Measured.
    """

    kind: str
    peak: int
    budget: float
    duration: float
    base: int


class Ranks:
    """This rank among those of its job."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._prefix = f"ebb/budget/{next(_sessions)}"
        self._has_called = False  # the others, to measure

    def join(self) -> None:
        """From now on the others wait for this one."""
        self._store.set(self._key("here", self._rank), "1")

    def begin(self, step: int, is_full: bool) -> int | None:
        """At the end of each step, from the first on: from which of them on all measure.

        Args:
            step: its number.
            is_full: this rank has no more room.

        Returns:
            None if it has not come to that.

        Raises:
            Exception: of the store.
        """
        if is_full and not self._has_called:
            self._has_called = True
            first = step + _ASKS + -step % _ASKS
            self._store.compare_set(self._key("full"), "", str(first))
        if step % _ASKS or not self._store.check([self._key("full")]):
            return None
        first = int(self._store.get(self._key("full")))
        return first if step >= first else None

    def agree(
        self, meeting: int, offer: Offer | None, gave_up: bool, plan: Callable[[Offer], Any]
    ) -> tuple[bool, Any]:
        """Speak with the others, all of which come to the same meeting.

        Args:
            meeting: its number.
            offer: None if this rank has not measured yet.
            gave_up: it never will have.
            plan: makes the plan of a kind of ranks from the most of their offers; on one of them.

        Returns:
            Whether there is to be another meeting, since a rank has no offer yet; and the plan.

        Raises:
            Exception: the others did not come.
        """
        here = self._here()
        said = {"gave_up": gave_up, "offer": None if offer is None else asdict(offer)}
        self._store.set(self._key(meeting, "said", self._rank), json.dumps(said))
        if self._rank == here[0]:
            self._store.set(self._key(meeting, "found"), json.dumps(self._judge(meeting, here)))
        found = json.loads(self._wait(self._key(meeting, "found"), 2))
        if found["missing"] and meeting != MEETINGS[-1]:
            return True, None
        if offer is None:
            return False, None
        most, leader = found["kinds"][offer.kind]
        made = self._key(meeting, "plan", leader)
        if leader == self._rank:
            self._store.set(made, pickle.dumps(plan(Offer(**most))))
        return False, pickle.loads(self._wait(made, 4))

    def _here(self) -> list[int]:
        return [n for n in range(self._size) if self._store.check([self._key("here", n)])]

    def _judge(self, meeting: int, ranks: list[int]) -> dict[str, Any]:
        """The most of each kind's offers, and which rank needs most."""
        kinds: dict[str, tuple[dict[str, Any], int]] = {}
        missing = []
        for rank, said in self._said(meeting, ranks).items():
            offer = said["offer"]
            if offer is None:
                missing += [] if said["gave_up"] else [rank]
                continue
            most, leader = kinds.get(offer["kind"], (offer, rank))
            if _lack(offer) > _lack(most):
                leader = rank
            together = {name: _most(most[name], offer[name]) for name in most}
            together["budget"] = min(most["budget"], offer["budget"])
            kinds[offer["kind"]] = (together, leader)
        return {"kinds": kinds, "missing": missing}

    def _said(self, meeting: int, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """By those that have come in time."""
        keys = {rank: self._key(meeting, "said", rank) for rank in ranks}
        try:
            self._store.wait(list(keys.values()), _WAIT)
        except Exception as error:  # of a kind that depends on the store
            log.info("not all ranks come: %s", error)
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _wait(self, key: str, times: int) -> bytes:
        self._store.wait([key], times * _WAIT)
        found: bytes = self._store.get(key)
        return found

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def _lack(offer: dict[str, Any]) -> float:
    """How much more it needs than it has."""
    need: float = offer["peak"] + offer["base"] - offer["budget"]
    return need


def _most(one: Any, other: Any) -> Any:
    """None, if a rank has not measured it."""
    return None if one is None or other is None else max(one, other)


def has_ranks() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_of_job() -> Ranks | None:
    """None if this process is alone. Each call begins a session of its own, which all ranks have to
    begin in the same order."""
    if not has_ranks():
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except Exception as error:  # torch's own business, and not all backends have one
        log.info("there is no store: %s", error)
        return None
    return Ranks(store, dist.get_rank(), dist.get_world_size())

"""Makes all ranks of a job agree on one plan."""

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

# Steps at whose end ranks exchange data, counted from the job's first step.
MEETINGS = (16, 32, 64)
_ASKS = 4  # interval in steps at which a rank asks if another rank has no more room
_WAIT = timedelta(seconds=30)  # timeout for other ranks; twice that for a rank that plans
_sessions = itertools.count()


# Note [Ranks that agree]
# Ranks exchange data through the store of the default process group, not by collectives: a rank
# that trains nothing takes no part, and the others must not hang. Ranks meet at the end of steps
# with fixed numbers, even if some have measured nothing yet. At any other step, a rank could wait
# for a rank that is already blocked in a collective of the next step, which needs both. Each wait
# has a timeout. A rank whose wait times out plans for itself, so plans may differ. The difference
# costs memory or time on a rank; gradients do not change.
#
# Ranks with the same blocks and operators (data parallelism) form a kind. They all get the plan of
# the rank that needs the most memory; it plans with the largest values that any of them measured.
# Stages of a pipeline are of different kinds.
#
# With EBB_BUDGET=auto, the first rank without room for all activations writes to the store at which
# step all ranks begin to measure. That step is far enough ahead for the other ranks, since hosts do
# not wait for devices. A rank that reads the number too late still counts from that step, so it
# takes part in the same meetings.


@dataclass(frozen=True)
class Offer:
    """Measurements of a rank."""

    kind: str  # identifies ranks that can share a plan
    peak: int  # of the recorded step
    budget: float  # bytes, or a share. The plan of a kind uses the lowest budget.
    duration: float  # as in Measured
    base: int


class Ranks:
    """Connects this rank to the other ranks of the job."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._prefix = f"ebb/budget/{next(_sessions)}"
        self._has_called = False  # this rank has asked the others to measure

    def join(self) -> None:
        """Make the other ranks wait for this one from now on."""
        self._store.set(self._key("here", self._rank), "1")

    def begin(self, step: int, is_full: bool) -> int | None:
        """Find out when all ranks begin to measure. Call at the end of each step.

        Args:
            step: number of the step that has ended.
            is_full: this rank has no room for more activations.

        Returns:
            The step from which all ranks count; None if it is not known or not reached.

        Raises:
            Exception: the store failed.
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
        """Exchange offers with all ranks at a meeting.

        Args:
            meeting: number of the meeting's step.
            offer: None if this rank has not measured yet.
            gave_up: this rank will never have an offer.
            plan: makes the plan of a kind from its combined offer; runs on one rank of the kind.

        Returns:
            True if there is another meeting, since a rank has no offer yet; and the plan.

        Raises:
            Exception: other ranks did not come in time.
        """
        ranks = [n for n in range(self._size) if self._store.check([self._key("here", n)])]
        message = {"gave_up": gave_up, "offer": None if offer is None else asdict(offer)}
        self._store.set(self._key(meeting, "said", self._rank), json.dumps(message))
        if self._rank == ranks[0]:
            self._store.set(self._key(meeting, "found"), json.dumps(self._judge(meeting, ranks)))
        verdict = json.loads(self._wait(self._key(meeting, "found"), 2))
        if verdict["missing"] and meeting != MEETINGS[-1]:
            return True, None
        if offer is None:
            return False, None
        most, leader = verdict["kinds"][offer.kind]
        made = self._key(meeting, "plan", leader)
        if leader == self._rank:
            self._store.set(made, pickle.dumps(plan(Offer(**most))))
        return False, pickle.loads(self._wait(made, 4))

    def _judge(self, meeting: int, ranks: list[int]) -> dict[str, Any]:
        """Combine the offers of each kind, and find the rank that needs the most memory."""
        kinds: dict[str, tuple[dict[str, Any], int]] = {}
        missing = []
        for rank, message in self._messages(meeting, ranks).items():
            offer = message["offer"]
            if offer is None:
                missing += [] if message["gave_up"] else [rank]
                continue
            most, leader = kinds.get(offer["kind"], (offer, rank))
            if _lack(offer) > _lack(most):
                leader = rank
            together = {name: _most(most[name], offer[name]) for name in most}
            together["budget"] = min(most["budget"], offer["budget"])
            kinds[offer["kind"]] = (together, leader)
        return {"kinds": kinds, "missing": missing}

    def _messages(self, meeting: int, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Messages of the ranks that came in time."""
        keys = {rank: self._key(meeting, "said", rank) for rank in ranks}
        try:
            self._store.wait(list(keys.values()), _WAIT)
        except Exception as error:  # the type depends on the store
            log.info("budget: some ranks did not report their measurements in time: %s", error)
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _wait(self, key: str, times: int) -> bytes:
        self._store.wait([key], times * _WAIT)
        value: bytes = self._store.get(key)
        return value

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def _lack(offer: dict[str, Any]) -> float:
    """Bytes that a rank needs beyond its budget."""
    need: float = offer["peak"] + offer["base"] - offer["budget"]
    return need


def _most(left: Any, right: Any) -> Any:
    """The larger value; None if a rank has not measured it."""
    return None if left is None or right is None else max(left, right)


def has_ranks() -> bool:
    """True if the job has several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_of_job() -> Ranks | None:
    """Connect to the job's ranks; None if this process is alone. Each call begins a new session;
    all ranks must begin their sessions in the same order."""
    if not has_ranks():
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except Exception as error:  # the function is internal to torch; some backends have no store
        log.info("budget: the process group has no store, so this rank plans alone: %s", error)
        return None
    return Ranks(store, dist.get_rank(), dist.get_world_size())

"""Makes all ranks of a job agree on one plan."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from ebb._support.log import log

_ASKS = 4  # interval in steps at which a rank checks if another rank has reached its limit
_PATIENCE = 32  # steps until a rank with an offer stops expecting the offers of others
_sessions = itertools.count()


# Note [Ranks that agree]
# Ranks exchange data through the store of the default process group, not by collectives: a rank
# that trains nothing takes no part, and the others must not hang. No rank ever waits: each looks
# into the store at the end of its steps, and trains on with all blocks recomputed until its plan is
# there. So ranks may apply the plan at different steps. Gradients do not depend on the plan.
#
# 1. Each rank writes its measurements, an offer. The last rank to write combines all offers.
# 2. Ranks with the same blocks and operators (data parallelism) form a kind. The leader, the rank
#    that exceeds its budget most, plans for its kind with the largest values that any rank of the
#    kind measured. Stages of a pipeline are of different kinds.
# 3. A rank plans for itself if offers are missing after _PATIENCE steps, or the plan after twice
#    as many. Plans may then differ, which costs memory or time on a rank.
#
# With EBB_BUDGET=auto, the first rank that cannot hold all activations writes to the store the step
# at which all ranks begin to measure. That step is some steps ahead of the rank's own, since other
# ranks may have run more steps already.


@dataclass(frozen=True)
class Offer:
    """Measurements of a rank."""

    kind: str  # identifies ranks that can share a plan
    peak: int  # bytes, of the recorded step above `base`
    budget: float  # bytes, or a share. The plan of a kind uses the lowest budget.
    duration: float  # as in Measured
    base: int  # as in Measured


class Ranks:
    """Connects this rank to the other ranks of the job."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart may reuse the store
        self._prefix = f"ebb/budget/{attempt}/{next(_sessions)}"
        self._has_called = False  # True if this rank has asked the others to measure
        self._looks = 0  # number of calls of `look` with an offer

    def join(self) -> None:
        """Count this rank among those whose offers the others need."""
        self._store.add(self._key("joined"), 1)

    def begins(self, step: int, is_full: bool) -> bool:
        """True if all ranks begin to measure now. Call at the end of each step.

        Args:
            step: number of the step that has ended.
            is_full: True if this rank has reached its memory limit.

        Raises:
            Exception: the store failed.
        """
        if is_full and not self._has_called:
            self._has_called = True
            first = step + _ASKS + -step % _ASKS
            self._store.compare_set(self._key("full"), "", str(first))
        if step % _ASKS or not self._store.check([self._key("full")]):
            return False
        return step >= int(self._store.get(self._key("full")))

    def look(
        self, offer: Offer | None, gave_up: bool, plan: Callable[[Offer], Any]
    ) -> tuple[bool, Any]:
        """Exchange offers and plans with other ranks. Call at the end of each step; never waits.

        Args:
            offer: None if this rank has not measured yet.
            gave_up: True if this rank will never have an offer.
            plan: makes a plan from a combined offer.

        Returns:
            True if the exchange has ended; and this rank's plan, else None.

        Raises:
            Exception: the store failed.
        """
        if offer is None:
            if gave_up and self._looks == 0:
                self._say(None)
            return gave_up, None
        self._looks += 1
        if self._looks == 1:
            self._say(offer)
        if not self._store.check([self._key("kinds")]):
            return self._own_if_late(1, offer, plan)
        combined = json.loads(self._store.get(self._key("kinds"))).get(offer.kind)
        if combined is None:  # this rank joined later, and no other is of its kind
            return True, plan(offer)
        made = self._key("plan", combined["leader"])
        if combined["leader"] == self._rank:
            found = plan(Offer(**combined["offer"]))
            self._store.set(made, pickle.dumps(found))
            return True, found
        if not self._store.check([made]):
            return self._own_if_late(2, offer, plan)
        return True, pickle.loads(self._store.get(made))

    def _own_if_late(
        self, times: int, offer: Offer, plan: Callable[[Offer], Any]
    ) -> tuple[bool, Any]:
        """Plan for this rank alone after more than `times` * _PATIENCE steps with an offer."""
        if self._looks <= times * _PATIENCE:
            return False, None
        log.info("budget: offers or the plan of other ranks are missing, so this rank plans alone")
        return True, plan(offer)

    def _say(self, offer: Offer | None) -> None:
        """Write this rank's offer; the last rank to write combines all offers."""
        place = self._store.add(self._key("places"), 1)
        message = {"rank": self._rank, "offer": None if offer is None else asdict(offer)}
        self._store.set(self._key("offer", place), json.dumps(message))
        count = self._store.add(self._key("written"), 1)
        if count >= self._store.add(self._key("joined"), 0):
            keys = [self._key("offer", n + 1) for n in range(count)]
            combined = _combined([json.loads(self._store.get(key)) for key in keys])
            # If only ranks without an offer have written so far, others may still join, so nothing
            # is combined. Once combined, the offers do not change.
            if combined:
                self._store.compare_set(self._key("kinds"), "", json.dumps(combined))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))


def _combined(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each kind, the combined offer and the rank that plans."""
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for message in messages:
        if (offer := message["offer"]) is not None:
            kinds.setdefault(offer["kind"], []).append((message["rank"], offer))
    combined = {}
    for kind, members in kinds.items():
        leader, _ = max(members, key=lambda member: (_lack(member[1]), -member[0]))
        offers = [offer for _, offer in members]
        most = {name: max(offer[name] for offer in offers) for name in offers[0]}
        most["budget"] = min(offer["budget"] for offer in offers)
        combined[kind] = {"leader": leader, "offer": most}
    return combined


def _lack(offer: dict[str, Any]) -> float:
    """Bytes that a rank needs beyond its budget."""
    need: float = offer["peak"] + offer["base"] - offer["budget"]
    return need


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
    return Ranks(store, dist.get_rank())

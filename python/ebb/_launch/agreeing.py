"""Makes all ranks of a job agree on one plan."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from ebb._support.log import log
from ebb._support.store_exchange import StoreExchange, Values, exchange_of

_ASKS = 4  # interval in steps at which a rank checks if another rank has reached its limit
_PATIENCE = 32  # steps until a rank with an offer stops expecting the offers of others
_sessions = itertools.count()


# Note [Ranks that agree]
# No rank ever waits: each looks into the store at the end of its steps, and trains on with all
# blocks recomputed until its plan is there. So ranks may apply the plan at different steps.
# Gradients do not depend on the plan. See Note [Ranks exchange values through a store].
#
# 1. Each rank writes its measurements, an offer. The last rank to write combines all offers.
# 2. Ranks with the same blocks and operators (data parallelism) form a kind. The leader, the rank
#    that exceeds its budget most, plans for its kind with the largest values that any rank of the
#    kind measured, and writes the plan. Stages of a pipeline are of different kinds.
# 3. A rank plans for itself if offers are missing after _PATIENCE steps, or the plan after twice
#    as many. Plans may then differ, which costs memory or time on a rank.
#
# With EBB_BUDGET=auto, the first rank that cannot hold all activations writes to the store the step
# at which all ranks begin to measure. That step is some steps ahead of the rank's own, since other
# ranks may have run more steps already.

# Note [Ranks that vote]
# If a file may have the plan, each rank votes at the end of its first step. A rank that has taken a
# plan looks for the votes of the others at the end of its steps, until all have voted or _PATIENCE
# steps have passed. If the file of one rank does not fit, or ranks with one model have taken
# different plans, all ranks measure, as without a file. Until then a rank that has taken a plan
# runs under it.


@dataclass(frozen=True)
class Offer:
    kind: str  # identifies ranks that can share a plan
    peak: int  # bytes, of the recorded step above `base`
    budget: float  # bytes, or a share. The plan of a kind uses the lowest budget.
    duration: float  # as in Measured
    base: int  # as in Measured


@dataclass(frozen=True)
class Vote:
    """A rank's vote on plans from files. A rank without blocks has no plan and no reason."""

    model: str = ""  # identifies ranks that must have the same plan
    plan: str = ""  # identifies the plan that the rank has taken
    why: str = ""  # why the rank takes no plan


class Ranks:
    """Connects this rank to the other ranks of the job. Methods raise whatever a failing store
    raises, and none waits."""

    def __init__(self, exchange: StoreExchange) -> None:
        self.first: int | None = None  # the first rank that shares this rank's plan; None: unknown
        # The lowest budget of the ranks that share this rank's plan, once it is known.
        self.lowest: int | float = math.inf
        self._exchange = exchange
        self._has_called = False  # True if this rank has asked the others to measure
        self._looks = 0  # number of calls of `look` with an offer
        self._polls = 0  # number of calls of `refusal`

    def join(self) -> None:
        """Count this rank among those whose offers the others need."""
        self._exchange.store.add("joined", 1)

    def vote(self, vote: Vote) -> None:
        """Vote once, at the end of the first step. See Note [Ranks that vote]."""
        store, why = self._exchange.store, vote.why
        if vote.plan:
            first = store.compare_set(f"file/{vote.model}", "", json.dumps(vote.plan))
            if json.loads(first) != vote.plan:
                why = "files of ranks have different plans"
        if why:
            store.compare_set("refused", "", json.dumps(f"rank {self._exchange.rank}: {why}"))
        store.add("votes", 1)

    def refusal(self) -> str | None:
        """Why the ranks take no plan from files; empty if all take one, None while votes are
        missing. Call after `vote`, at the end of each step."""
        self._polls += 1
        has_all = self._exchange.store.add("votes", 0) >= self._exchange.size
        why = self._exchange.read("refused")  # ranks write it before they are counted
        if why is not None:
            return str(why)
        return "" if has_all or self._polls > _PATIENCE else None

    def leave(self) -> None:
        """Tell the others that this rank will have no offer, unless it had one."""
        if self._looks == 0:
            self._give(None)

    def begins(self, step: int, is_full: bool) -> bool:
        """True if all ranks begin to measure now. Call at the end of each step. `is_full`: True if
        this rank has reached its memory limit."""
        if is_full and not self._has_called:
            self._has_called = True
            first = step + _ASKS + -step % _ASKS
            self._exchange.store.compare_set("full", "", str(first))
        agreed = None if step % _ASKS else self._exchange.read("full")
        return agreed is not None and step >= agreed

    def look(self, offer: Offer, plan: Callable[[Offer], Any]) -> Any:
        """This rank's plan, as values of JSON; None while it is missing. Call at the end of each
        step, from the step on in which this rank has measured. `plan`: makes the plan of a combined
        offer."""
        self._looks += 1
        if self._looks == 1:
            self._give(offer)
        exchange, patience = self._exchange, _PATIENCE
        if (kinds := exchange.read("kinds")) is not None:
            combined = kinds.get(offer.kind)
            if combined is None:  # this rank joined later, and no other is of its kind
                return plan(offer)
            self.first, self.lowest = combined["first"], combined["offer"]["budget"]
            made, patience = f"plan/{combined['leader']}", 2 * _PATIENCE
            if combined["leader"] == exchange.rank:
                found = plan(Offer(**combined["offer"]))
                exchange.store.set(made, json.dumps(found))
                return found
            if (found := exchange.read(made)) is not None:
                return found
        if self._looks <= patience:
            return None
        log.info("budget: offers or the plan of other ranks are missing, so this rank plans alone")
        return plan(offer)

    def _give(self, offer: Offer | None) -> None:
        """Write this rank's offer; the last rank to write combines all offers."""
        exchange = self._exchange
        if offer is not None:
            exchange.put("offer", asdict(offer))
        if exchange.store.add("written", 1) >= exchange.store.add("joined", 0):
            combined = _combined(exchange.values("offer", range(exchange.size)))
            # If only ranks without an offer have written so far, others may still join, so nothing
            # is combined. Once combined, the offers do not change.
            if combined:
                exchange.store.compare_set("kinds", "", json.dumps(combined))


def _combined(offers: Values) -> dict[str, dict[str, Any]]:
    """For each kind: the combined offer, the rank that plans, and the first rank."""
    kinds: dict[str, Values] = {}
    for rank, offer in offers:
        kinds.setdefault(offer["kind"], []).append((rank, offer))
    combined = {}
    for kind, members in kinds.items():
        # The rank that needs the most bytes beyond its budget; of several, the first.
        lacks = [(o["peak"] + o["base"] - o["budget"], -rank) for rank, o in members]
        leader = -max(lacks)[1]
        most = {name: max(offer[name] for _, offer in members) for name in members[0][1]}
        most["budget"] = min(offer["budget"] for _, offer in members)
        first = min(rank for rank, _ in members)
        combined[kind] = {"leader": leader, "first": first, "offer": most}
    return combined


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_of_job() -> Ranks | None:
    """Join the job's ranks in a new session; None if this process is alone. All ranks must begin
    their sessions in the same order."""
    if not has_ranks():
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart may reuse the store
    prefix, why = f"ebb/budget/{attempt}/{next(_sessions)}", ""
    try:
        exchange = exchange_of(dist.group.WORLD, prefix)
    except Exception as error:  # the lookup of the store is internal to torch
        exchange, why = None, f": {error}"
    if exchange is None:
        log.info("budget: the process group has no store, so this rank plans alone%s", why)
        return None
    ranks = Ranks(exchange)
    ranks.join()
    return ranks

"""Offers, plans and votes that ranks exchange through a store, without processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict

from torch.distributed import HashStore

from ebb._launch import agreeing
from ebb._support.store_exchange import StoreExchange


def test_restarted_job_uses_other_keys(monkeypatch):
    prefixes = []
    monkeypatch.setattr(agreeing, "has_ranks", lambda: True)
    monkeypatch.setattr(agreeing, "exchange_of", lambda _group, prefix: prefixes.append(prefix))
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr(agreeing, "_sessions", itertools.count())
        assert agreeing.ranks_of_job() is None
    assert len(set(prefixes)) == 2


def joined(store, rank, size=5):
    rank = agreeing.Ranks(StoreExchange(store, "", rank, size))
    rank.join()
    return rank


def joined_later(first, rank):
    return joined(first._exchange.store.underlying_store, rank)


def ranks_of(count, size=5):
    store = HashStore()
    return [joined(store, rank, size) for rank in range(count)]


def offer(kind="a", peak=100, budget=50, base=0, duration=1.0):
    return agreeing.Offer(kind, peak, budget, duration, base)


# A plan here is the offer for which it was made.


def look(rank, own):
    """This rank's plan; None while it is missing."""
    found = rank.look(own, asdict)
    return found and agreeing.Offer(**found)


def plans_of(ranks, offers, looks=1):
    """Each rank's plan after `looks` looks. A rank without an offer gives up."""
    found = [None] * len(ranks)
    for turn, (n, rank) in itertools.product(range(looks), enumerate(ranks)):
        if offers[n] is not None and found[n] is None:
            found[n] = look(rank, offers[n])
        elif offers[n] is None and turn == 0:
            rank.leave()
    return found


def test_rank_that_lacks_most_plans_for_the_largest_values():
    offers = [
        offer(peak=100, budget=90, base=5),
        offer(peak=95, budget=50, base=7, duration=2.0),  # lacks most
        offer(peak=100, budget=60, base=1),
        offer(kind="b", peak=7),
    ]
    found = plans_of(ranks_of(4), offers, looks=3)
    together = agreeing.Offer("a", 100, 50, 2.0, 7)
    assert found == [together] * 3 + [offers[3]]
    kinds = agreeing._combined([(n, vars(o)) for n, o in enumerate(offers)])
    assert {kind: entry["leader"] for kind, entry in kinds.items()} == {"a": 1, "b": 3}


def test_plan_does_not_need_a_rank_that_gave_up():
    assert plans_of(ranks_of(3), [offer(), None, offer()], looks=2) == [offer(), None, offer()]


def test_rank_that_gives_up_before_others_have_joined_settles_nothing():
    [first] = ranks_of(1)
    first.leave()
    others = [joined_later(first, rank) for rank in (1, 2)]
    assert plans_of(others, [offer(peak=3), offer(peak=7)], looks=2) == [offer(peak=7)] * 2


def test_rank_plans_alone_if_offers_of_others_stay_away():
    first, _ = ranks_of(2)
    looks = [look(first, offer()) for _ in range(agreeing._PATIENCE + 1)]
    assert looks == [None] * agreeing._PATIENCE + [offer()]


def test_rank_plans_alone_if_the_leader_leaves():
    first, leader = ranks_of(2)
    assert look(first, offer()) is None
    leader._give(offer(peak=1000))
    looks = [look(first, offer()) for _ in range(2 * agreeing._PATIENCE)]
    assert looks == [None] * (2 * agreeing._PATIENCE - 1) + [offer()]


def test_rank_that_joins_late_gets_the_plan_of_its_kind():
    [first] = ranks_of(1)
    assert look(first, offer()) == offer()
    assert look(joined_later(first, 1), offer(peak=1000)) == offer()
    assert look(joined_later(first, 2), offer(kind="b")) == offer(kind="b")


class Schedule:
    """Ranks whose steps end in a random order, or in turns as collectives enforce.

    Each rank needs some steps to measure. In a random order, ranks may also come late, stop, or
    give up.
    """

    def __init__(self, seed, *, in_turns):
        self.random = random.Random(seed)
        size = self.random.randint(2, 5)
        store = HashStore()
        self.ranks = [agreeing.Ranks(StoreExchange(store, "", rank, size)) for rank in range(size)]
        self.in_turns = in_turns
        self.offers = [
            offer(self.random.choice("ab"), self.random.randint(1, 9)) for _ in range(size)
        ]
        self.steps_to_measure = [self.random.randint(2, 6) for _ in range(size)]
        self.give_up = [self.random.random() < 0.15 for _ in range(size)]
        last = [10**6] * 5 + [self.random.randint(1, 12)]
        self.last = [self.random.choice(last) for _ in range(size)]
        self.steps, self.plans = [0] * size, [None] * size

    def run(self):
        size = len(self.ranks)
        for turn in range(100 * size):
            rank = turn % size if self.in_turns else self.random.randrange(size)
            if self.plans[rank] is None and (self.in_turns or self.steps[rank] < self.last[rank]):
                self.end_step(rank)

    def end_step(self, n):
        if self.steps[n] == 0:
            self.ranks[n].join()
        self.steps[n] += 1
        if self.steps[n] < self.steps_to_measure[n]:
            return
        if self.give_up[n]:
            self.ranks[n].leave()
            self.plans[n] = "gave up"
        else:
            self.plans[n] = look(self.ranks[n], self.offers[n])


def test_every_rank_gets_a_plan_in_any_order_of_steps():
    for seed in range(500):
        schedule = Schedule(seed, in_turns=False)
        schedule.run()
        for steps, plan in zip(schedule.steps, schedule.plans, strict=True):
            assert plan is not None or steps < 6 + 2 * agreeing._PATIENCE + 2, seed


def test_ranks_of_a_kind_get_one_plan_if_they_step_together():
    for seed in range(500):
        schedule = Schedule(seed, in_turns=True)
        schedule.run()
        for kind in "ab":
            plans = {
                plan
                for plan, own in zip(schedule.plans, schedule.offers, strict=True)
                if own.kind == kind and plan != "gave up"
            }
            assert None not in plans, seed
            assert len(plans) <= 1, seed


# Votes on plans from files


def refusals_after(votes):
    """What each rank that has voted learns, after each vote."""
    refusals, ranks = [], ranks_of(len(votes), len(votes))
    for n, (rank, vote) in enumerate(zip(ranks, votes, strict=True)):
        rank.vote(vote)
        refusals.append([other.refusal() for other in ranks[: n + 1]])
    return refusals


A, OTHER_A, B = agreeing.Vote("a", "1"), agreeing.Vote("a", "2"), agreeing.Vote("b", "2")
NO_FILE = agreeing.Vote(why="no file")
DIFFERENT = "rank 2: files of ranks have different plans"


def test_ranks_take_plans_only_if_all_votes_agree():
    assert refusals_after([A, agreeing.Vote(), B]) == [[None], [None] * 2, [""] * 3]
    refused = "rank 1: no file"
    assert refusals_after([A, NO_FILE, A]) == [[None], [refused] * 2, [refused] * 3]
    assert refusals_after([A, B, OTHER_A])[-1] == [DIFFERENT] * 3


def test_rank_takes_its_plan_if_another_never_votes():
    first, _ = ranks_of(2, 2)
    first.vote(A)
    refusals = [first.refusal() for _ in range(agreeing._PATIENCE + 1)]
    assert refusals == [None] * agreeing._PATIENCE + [""]


def test_all_ranks_or_none_take_plans_in_any_order_of_votes():
    """Unless a vote comes later than all other ranks wait."""
    for seed in range(300):
        generator = random.Random(seed)
        size = generator.randint(2, 4)
        ranks = ranks_of(size, size)
        votes = [generator.choices([A, OTHER_A, NO_FILE], [8, 1, 1])[0] for _ in ranks]
        fate = [None] * size
        waiting = list(range(size))
        while None in fate:
            n = generator.randrange(size)
            if n in waiting:
                waiting.remove(n)
                ranks[n].vote(votes[n])
            elif fate[n] is None:
                fate[n] = ranks[n].refusal()
        assert len(set(fate)) == 1, (seed, votes, fate)
        assert (fate[0] == "") == (len(set(votes)) == 1 and not votes[0].why)

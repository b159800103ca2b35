"""Offers and plans that ranks exchange through a store, without processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict

from torch.distributed import HashStore

from ebb._launch import agreeing
from ebb._support.store_exchange import StoreExchange


def test_an_attempt_after_a_restart_does_not_read_the_plan_of_the_one_before(monkeypatch):
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


def ranks_of(size):
    store = HashStore()
    return [joined(store, rank) for rank in range(size)]


def offer(kind="a", peak=100, budget=50, base=0, duration=1.0):
    return agreeing.Offer(kind, peak, budget, duration, base)


def look(rank, said, gave_up, plan):
    if said is None:
        if gave_up:
            rank.leave()
        return gave_up, None
    found = rank.look(said, lambda most: asdict(plan(most)))
    return found is not None, found and agreeing.Offer(**found)


def plans_of(ranks, offers, looks=1):
    """Each rank's plan after `looks` looks. A plan here is the offer for which it was made."""
    found = [None] * len(ranks)
    for _ in range(looks):
        for n, (rank, said) in enumerate(zip(ranks, offers, strict=True)):
            if found[n] is None:
                is_done, plan = look(rank, said, said is None, lambda most: most)
                found[n] = plan if is_done else None
    return found


def test_the_rank_that_lacks_most_plans_for_the_largest_values():
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


def test_a_rank_that_gave_up_is_not_needed():
    assert plans_of(ranks_of(3), [offer(), None, offer()], looks=2) == [offer(), None, offer()]


def test_a_rank_that_gives_up_before_others_have_joined_settles_nothing():
    [first] = ranks_of(1)
    assert look(first, None, True, None) == (True, None)
    others = [joined(first._exchange.store.underlying_store, rank) for rank in (1, 2)]
    assert plans_of(others, [offer(peak=3), offer(peak=7)], looks=2) == [offer(peak=7)] * 2


def test_a_rank_without_others_offers_plans_alone_after_a_while():
    first, second = ranks_of(2)
    for _ in range(agreeing._PATIENCE):
        assert look(first, offer(), False, lambda most: most) == (False, None)
    assert look(first, offer(), False, lambda most: most) == (True, offer())
    assert look(second, None, False, None) == (False, None)


def test_a_leader_that_leaves_keeps_no_other_from_its_plan():
    first, leader = ranks_of(2)
    assert look(first, offer(), False, lambda most: most) == (False, None)
    leader._give(offer(peak=1000))
    for _ in range(2 * agreeing._PATIENCE - 1):
        assert look(first, offer(), False, lambda most: most) == (False, None)
    assert look(first, offer(), False, lambda most: most) == (True, offer())


def test_a_rank_that_comes_later_gets_the_plan_of_its_kind():
    [first] = ranks_of(1)
    assert look(first, offer(), False, lambda most: most) == (True, offer())
    late = joined(first._exchange.store.underlying_store, 1)
    assert look(late, offer(peak=1000), False, None) == (True, offer())
    other = joined(first._exchange.store.underlying_store, 2)
    assert look(other, offer(kind="b"), False, lambda most: most) == (True, offer(kind="b"))


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
        measured = self.steps[n] >= self.steps_to_measure[n]
        said = self.offers[n] if measured and not self.give_up[n] else None
        gave_up = measured and self.give_up[n]
        is_done, plan = look(self.ranks[n], said, gave_up, lambda most: most)
        if is_done:
            self.plans[n] = plan or "gave up"


def test_no_order_of_steps_leaves_a_rank_without_a_plan():
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


# Votes on plans from files -----------------------------------------------------------------------


def voters(size):
    store = HashStore()
    return [joined(store, rank, size) for rank in range(size)]


def votes_of(votes):
    """What each rank that has voted learns, after each vote."""
    outcomes, ranks = [], voters(len(votes))
    for n, (rank, vote) in enumerate(zip(ranks, votes, strict=True)):
        rank.vote(vote)
        outcomes.append([other.refusal() for other in ranks[: n + 1]])
    return outcomes


def test_ranks_that_all_take_their_plans():
    votes = [agreeing.Vote("a", "1"), agreeing.Vote(), agreeing.Vote("b", "2")]
    assert votes_of(votes) == [[None], [None] * 2, [""] * 3]


def test_one_rank_that_takes_no_plan_is_enough():
    votes = [agreeing.Vote("a", "1"), agreeing.Vote(why="no file"), agreeing.Vote("a", "1")]
    assert votes_of(votes) == [[None], *[["rank 1: no file"] * n for n in (2, 3)]]


def test_ranks_of_one_model_with_different_plans():
    votes = [agreeing.Vote("a", "1"), agreeing.Vote("b", "2"), agreeing.Vote("a", "2")]
    why = "rank 2: files of ranks have different plans"
    assert votes_of(votes)[-1] == [why] * 3


def test_a_rank_that_never_votes_keeps_no_other_from_its_plan():
    first, _ = voters(2)
    first.vote(agreeing.Vote("a", "1"))
    assert [first.refusal() for _ in range(agreeing._PATIENCE)] == [None] * agreeing._PATIENCE
    assert first.refusal() == ""


def test_in_no_order_of_votes_some_ranks_take_their_plans_and_others_do_not():
    """Unless a vote comes later than all other ranks wait."""
    choices = [agreeing.Vote("a", "1"), agreeing.Vote("a", "2"), agreeing.Vote(why="changed")]
    for seed in range(300):
        generator = random.Random(seed)
        ranks = voters(generator.randint(2, 4))
        votes = [generator.choices(choices, [8, 1, 1])[0] for _ in ranks]
        fate = [None] * len(ranks)
        waiting = list(range(len(ranks)))
        while None in fate:
            n = generator.randrange(len(ranks))
            if n in waiting:
                waiting.remove(n)
                ranks[n].vote(votes[n])
            elif fate[n] is None:
                fate[n] = ranks[n].refusal()
        assert len(set(fate)) == 1, (seed, votes, fate)
        assert (fate[0] == "") == (len(set(votes)) == 1 and not votes[0].why)

"""Values that ranks exchange through a store: ranks that are late, leave or end, and old keys. Each
rank is a thread here."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ebb._support import store_exchange
from ebb._support.store_exchange import StoreExchange, exchange_of
from ebb_tests.ranks.two_ranks import on_two_ranks

RANKS = 3
SECONDS = timedelta(seconds=20)


def hash_stores(_folder):
    return [dist.HashStore()] * RANKS


def file_stores(folder):
    return [dist.FileStore(f"{folder}/store", -1) for _ in range(RANKS)]


def tcp_stores(_folder):
    server = dist.TCPStore("localhost", 0, is_master=True, timeout=SECONDS)
    others = (dist.TCPStore("localhost", server.port, timeout=SECONDS) for _ in range(RANKS - 1))
    return [server, *others]


@pytest.fixture(params=[hash_stores, file_stores, tcp_stores])
def stores(request, tmp_path):
    made = request.param(tmp_path)
    for store in made:
        store.set_timeout(SECONDS)
    return made


def exchanges_of(stores, prefix="a"):
    return [StoreExchange(store, prefix, rank, RANKS) for rank, store in enumerate(stores)]


def clones_of(stores):
    """Connections of their own, since a thread that waits blocks the others of its connection."""
    clones = [store.clone() for store in stores]
    for clone in clones:
        clone.set_timeout(SECONDS)
    return clones


def on_ranks(function, exchanges):
    """Runs `function` for all ranks at once. Returns the results, by rank."""
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(function, exchanges))


def gathered(exchange, key="key", value=None, flag=False, expected=RANKS):
    return exchange.gather(key, expected, value, flag, "ranks reached the end")


def as_lists(outcome):
    """A rank that was not the last one has read it as JSON."""
    return outcome[0], [tuple(pair) for pair in outcome[1]]


class Replaced:
    """A store, with other methods for some of its own."""

    def __init__(self, store, **methods):
        self.store = store
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.mark.parametrize("values", [["", None, {"a": [2]}], [None] * RANKS], ids=["some", "none"])
def test_all_ranks_get_values_of_all(stores, values):
    def gather(exchange):
        flag = exchange.rank == 1 and "" in values
        return as_lists(gathered(exchange, value=values[exchange.rank], flag=flag))

    found = on_ranks(gather, exchanges_of(stores))

    given = [(rank, value) for rank, value in enumerate(values) if value is not None]
    assert found == [("" in values, given)] * RANKS


def test_groups_with_other_prefixes_are_apart(stores):
    groups = [exchanges_of(clones_of(stores), prefix) for prefix in "abc"]

    def gather(exchange):
        return [gathered(exchange, str(n), groups_of[exchange], n == 2) for n in range(5)]

    groups_of = {exchange: "abc"[n] for n, group in enumerate(groups) for exchange in group}
    found = on_ranks(gather, [exchange for group in groups for exchange in group])

    for n, outcomes in enumerate(found):
        values = [(rank, "abc"[n // RANKS]) for rank in range(RANKS)]
        assert [as_lists(outcome) for outcome in outcomes] == [(k == 2, values) for k in range(5)]


def test_error_counts_missing_ranks_and_later_gathers_work():
    exchanges = exchanges_of(hash_stores(None))
    exchanges[0].store.set_timeout(timedelta(seconds=0.5))

    def gather(exchange):
        with pytest.raises(RuntimeError) as error:
            gathered(exchange)
        return str(error.value)

    for said, exchange in zip(on_ranks(gather, exchanges[:2]), exchanges, strict=False):
        assert said == f"ebb: rank {exchange.rank} timed out: 2 of 3 ranks reached the end"
    exchanges[0].store.set_timeout(SECONDS)
    found = on_ranks(lambda exchange: gathered(exchange, "next", exchange.rank), exchanges)
    values = [(rank, rank) for rank in range(RANKS)]
    assert [as_lists(outcome) for outcome in found] == [(False, values)] * RANKS


def test_lost_store_is_an_error():
    exchange = exchanges_of(hash_stores(None))[0]

    def lost(_key, number=0):
        if number:
            return number
        raise RuntimeError("connection reset")

    exchange.store = Replaced(None, add=lost, get=lost)
    with pytest.raises(RuntimeError, match="timed out: not all of 3 ranks reached the end"):
        gathered(exchange)


@pytest.mark.parametrize("latest", range(RANKS))
def test_ranks_ahead_delete_no_outcome_that_others_have_still_to_read(stores, latest):
    """The next gathers begin, and delete keys, while a rank is late to read an outcome."""
    exchanges = exchanges_of(stores)

    def gather(exchange):
        sleeps = random.Random(exchange.rank)
        get = exchange.store.get

        def get_late(key):
            time.sleep(sleeps.random() * (5e-3 if exchange.rank == latest else 1e-3))
            return get(key)

        exchange.store = Replaced(exchange.store, get=get_late)
        found = []
        for n in range(40):
            has_value = (n + exchange.rank) % 3 == 0
            found.append(as_lists(gathered(exchange, str(n), n if has_value else None)))
        return found

    expected = [
        (False, [(rank, n) for rank in range(RANKS) if not (n + rank) % 3]) for n in range(40)
    ]
    assert on_ranks(gather, exchanges) == [expected] * RANKS


def test_gathers_leave_few_keys(stores):
    exchanges = exchanges_of(stores)

    def keys_after(count):
        def gather(exchange):
            for _ in range(count):
                gathered(exchange, str(next(exchange.rounds)), exchange.rank)

        on_ranks(gather, exchanges)
        return stores[0].num_keys()

    keys = keys_after(store_exchange._MOST_VALUES + 2)
    assert keys_after(20) == keys
    assert keys <= RANKS * store_exchange._MOST_VALUES + 6


def test_rank_that_leaves_neither_waits_nor_deletes_what_others_need(stores):
    """Rank 2 leaves each round, and is the first in the next one."""
    exchanges = exchanges_of(stores)

    def rounds(exchange):
        found = []
        for n in range(20):
            if exchange.rank == 2:
                outcome = exchange.give(f"{n}/0", RANKS, "left")
                assert outcome is None or as_lists(outcome) == (False, [(2, "left")])
            else:
                time.sleep(2e-3 * exchange.rank)
                found.append(as_lists(gathered(exchange, f"{n}/0")))
                found.append(as_lists(gathered(exchange, f"{n}/1", expected=RANKS - 1)))
            if n % 3 == 2:
                found.append(as_lists(gathered(exchange, f"{n}/all ranks", exchange.rank)))
        return found

    all_values = (False, [(rank, rank) for rank in range(RANKS)])
    left = [(False, [(2, "left")]), (False, [])]
    found = on_ranks(rounds, exchanges)
    assert found[2] == [all_values] * 6
    expected = [outcome for n in range(20) for outcome in [*left, *[all_values] * (n % 3 == 2)]]
    assert found[:2] == [expected] * 2


def test_values_are_read_one_by_one_and_the_oldest_are_deleted(stores):
    first, second, _ = exchanges_of(stores)
    for n in range(store_exchange._MOST_VALUES + 1):
        first.put(str(n), n)
    second.put("1", "b")

    assert second.values("0", range(RANKS)) == []
    assert second.values("1", range(RANKS)) == [(0, 1), (1, "b")]
    assert second.values("1", [1, 2]) == [(1, "b")]
    assert second.read("64/0") == 64
    assert second.read("65/0") is None


def test_store_may_lack_deletion():
    def delete_key(_key):
        raise RuntimeError("not implemented")

    exchange = StoreExchange(dist.HashStore(), "a", 0, 1)
    exchange.store = Replaced(exchange.store, delete_key=delete_key)
    for n in range(store_exchange._MOST_VALUES + 4):
        assert gathered(exchange, str(n), n, expected=1) == (False, [(0, n)])


class CountingStore:
    def __init__(self, store):
        self.store, self.calls = store, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self.store, name)(*arguments)

        return call


def test_gather_without_values_calls_the_store_twice():
    """And two more of one rank, which deletes old keys."""
    exchanges = exchanges_of(hash_stores(None))
    for exchange in exchanges:
        exchange.store = CountingStore(exchange.store)

    def gather(exchange):
        for n in range(3):
            gathered(exchange, str(n))

    on_ranks(gather, exchanges)
    calls = sorted(call for exchange in exchanges for call in exchange.store.calls)
    assert calls == ["add"] * 9 + ["delete_key"] * 2 + ["get"] * 6 + ["set"] * 3


@on_two_ranks
def test_exchange_of_a_group():
    rank = dist.get_rank()
    apart = [dist.new_group([0]), dist.new_group([1])]
    both = dist.new_group([0, 1])

    assert exchange_of(apart[rank], "a") is None  # without others
    assert exchange_of(apart[1 - rank], "a") is None  # of others
    for waiting in ("", "this test"):
        found = exchange_of(both, "a", waiting=waiting)
        world = exchange_of(dist.group.WORLD, "a", waiting=waiting)
        assert (found.rank, found.size) == (rank, 2)
        values = [(other, f"{waiting}{other}") for other in range(2)]
        assert as_lists(gathered(world, f"key {waiting}", "world", expected=2))[1][0] == (
            0,
            "world",
        )
        mine = gathered(found, f"key {waiting}", f"{waiting}{rank}", expected=2)
        assert as_lists(mine) == (False, values)
        store, shared = dist.distributed_c10d._get_process_group_store(both), found.store
        assert shared.underlying_store.timeout == store.timeout
        assert (shared.underlying_store is store) == (not waiting)  # else a connection of its own
    dist.barrier()


@on_two_ranks
def test_group_without_a_store_has_no_exchange():
    with pytest.MonkeyPatch.context() as monkeypatch:
        distributed = dist.distributed_c10d
        monkeypatch.setattr(distributed, "_get_process_group_store", lambda _group: None)
        assert exchange_of(dist.group.WORLD, "a") is None
        message = r"ebb: this test need a process group with a store, which the backend gloo does"
        with pytest.raises(NotImplementedError, match=message):
            exchange_of(dist.group.WORLD, "a", waiting="this test")

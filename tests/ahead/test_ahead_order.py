"""Which region is replayed next, and how much of it: nothing in vain, and never above the limit."""

from __future__ import annotations

import gc

import pytest
import torch

import ebb
from ebb_tests.programs.ahead import WaitInBackward, X, blocks, chain, counts, counts_ahead, region
from ebb_tests.programs.paged import Keep
from ebb_tests.replays import replays_ahead, wait_for_replays


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    gc.collect()
    wait_for_replays()
    assert ebb.stats()["ahead"]["bytes"] == 0


@pytest.mark.parametrize("regions", [1, 2, 5])
def test_all_but_the_last_region_are_there_in_time(regions):
    modules, x = blocks(5), torch.randn(X, requires_grad=True)
    with replays_ahead(regions):
        ebb.reset_stats()
        did = counts(lambda: chain(modules, x).sum().backward())
        total = ebb.stats()["total"]

    assert did["regions_held"] == 1
    assert did["regions_in_time"] == 4
    assert did["regions_in_vain"] == did["regions_late"] == did["regions_stopped"] == 0
    assert total["ops_replayed"] == total["ops_replayed_ahead"] > 0  # backward did nothing itself


def test_off_is_as_without():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    did = counts(lambda: chain(modules, x).sum().backward())

    assert not any(did.values())
    assert ebb.stats()["total"]["ops_replayed"] > 0
    assert ebb.stats()["total"]["ops_replayed_ahead"] == 0


def assert_ahead(program, *, in_time):
    """So many regions are replayed in time, and none in vain."""
    did = counts_ahead(program)
    assert did["regions_in_time"] == in_time
    assert did["regions_in_vain"] == 0


def test_code_between_regions_hides_the_data_flow_but_not_the_order():
    modules, x = blocks(4), torch.randn(X, requires_grad=True)

    def program():
        h, results = x, []  # a storage in the place of one would be taken for it
        for module in modules:
            with region():
                y = module(WaitInBackward.apply(h))
            results.append(y)
            h = y * 2 + h
        h.sum().backward()

    assert_ahead(program, in_time=3)


def test_micro_batches_are_told_apart():
    """The region recorded just before another is of another micro-batch."""
    modules = blocks(3)
    xs = [torch.randn(X, requires_grad=True) for _ in range(3)]

    def program():
        hs = list(xs)
        for module in modules:
            for i, h in enumerate(hs):
                with region():
                    hs[i] = module(WaitInBackward.apply(h))
        for h in hs:
            h.sum().backward()

    assert_ahead(program, in_time=6)


def test_the_later_of_two_branches_comes_first():
    one, other, last = blocks(3)
    x = torch.randn(X, requires_grad=True)

    def program():
        with region():
            a = one(WaitInBackward.apply(x))
        with region():
            b = other(WaitInBackward.apply(x))
        with region():
            loss = last(WaitInBackward.apply(a) + WaitInBackward.apply(b)).sum()
        loss.backward()

    assert_ahead(program, in_time=2)


def test_a_region_that_backward_never_reaches():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)

    def program():
        early = chain(modules[:2], x)
        loss = chain(modules[2:], early).sum()
        torch.autograd.grad(loss, early)
        del early, loss
        gc.collect()

    did = counts_ahead(program)
    assert did["regions_in_vain"] == 1


class Wide:
    """A region whose bytes are known: `depth` results of 64 KiB are saved."""

    nbytes = 64 * 1024

    def __init__(self, depth):
        self.depth = depth

    def __call__(self, x):
        for _ in range(self.depth):
            x = x.sin()
        return x


def most_bytes_ahead(modules, x):
    """The most bytes that replays ahead hold between two regions of a backward."""
    seen = []

    def look(gradient):
        wait_for_replays()
        seen.append(ebb.stats()["ahead"]["bytes"])

    h = x
    for module in modules:
        with region():
            h = module(h)
        h.register_hook(look)
    h.sum().backward()
    return max(seen)


@pytest.mark.parametrize("depth", [1, 4, 9])
def test_bytes_are_as_predicted(depth):
    """sin saves its input: the first is the leaf, and there are depth - 1 more."""
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)
    with replays_ahead():
        before = ebb.stats()["ahead"]["bytes"]
        h = chain([Wide(depth)], x)
        held = ebb.stats()["ahead"]["bytes"] - before
        h.sum().backward()

    assert before == 0
    assert held == (depth - 1) * Wide.nbytes


@pytest.mark.parametrize("room", [0, 1, 3, 5, 100])
def test_the_limit_holds(room):
    modules = [Wide(4), Wide(9), Wide(2), Wide(6)]
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)
    limit = room * Wide.nbytes
    with replays_ahead(3, limit):
        most = max(most_bytes_ahead(modules, x) for _ in range(2))

    assert most <= limit
    assert room == 0 or most > 0


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_no_more_regions_are_ahead_than_are_asked_for(regions):
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)
    with replays_ahead(regions):
        most = most_bytes_ahead([Wide(4)] * 6, x)

    assert most == regions * 3 * Wide.nbytes


def test_bytes_that_pass_are_given_back():
    """Results that nobody has saved live as long as what reads them has not run."""
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)

    def body(h):
        for _ in range(4):
            for _ in range(10):
                h = h + 1
            h = h.sin()
        return h

    did = counts_ahead(lambda: chain([body, body], x).sum().backward(), limit=8 * Wide.nbytes)
    assert did["regions_in_time"] == 1


def test_who_looks_at_a_saved_tensor_is_not_backward():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)

    def program():
        with region():
            h = Keep.apply(modules[0](x))
            ctx = Keep.last
        loss = chain(modules[1:], h).sum()
        assert torch.equal(ctx.saved_tensors[0], h)
        loss.backward()

    did = counts_ahead(program)
    Keep.last = None
    assert did["regions_in_time"] == 2


def test_what_was_held_is_given_up_when_another_region_is_entered():
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)
    with replays_ahead():
        h = chain([Wide(5)], x)
        assert ebb.stats()["ahead"]["bytes"] == 4 * Wide.nbytes
        h = chain([Wide(3)], h)
        assert ebb.stats()["ahead"]["bytes"] == 2 * Wide.nbytes
        with ebb.region(ebb.policies.save_all):
            h = h.exp()
        assert ebb.stats()["ahead"]["bytes"] == 0
        h.sum().backward()


def test_what_was_taken_is_given_back_where_backward_arrives():
    """Though the graph lives on."""
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)
    with replays_ahead():
        loss = chain([Wide(5)], x).sum()
        assert ebb.stats()["ahead"]["bytes"] > 0
        loss.backward(retain_graph=True)
        assert ebb.stats()["ahead"]["bytes"] == 0
        del loss


def test_what_the_program_drops_is_dropped():
    x = torch.randn(Wide.nbytes // 4, requires_grad=True)
    with replays_ahead():
        h = chain([Wide(5)], x)
        assert ebb.stats()["ahead"]["bytes"] > 0
        del h
        assert ebb.stats()["ahead"]["bytes"] == 0


def test_nested_regions_count_as_one():
    modules, x = blocks(4), torch.randn(X, requires_grad=True)

    def program():
        h = x
        for pair in (modules[:2], modules[2:]):
            with region():
                h = chain(pair, h)
        h.sum().backward()

    did = counts_ahead(program)
    assert did["regions_in_time"] + did["regions_held"] == 2


def test_saved_values_are_not_made_again():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)

    def program():
        h = x
        for module in modules:
            with ebb.region(ebb.policies.save_all):
                h = module(h)
        h.sum().backward()

    with replays_ahead():
        ebb.reset_stats()
        did = counts(program)
    assert ebb.stats()["total"]["ops_replayed"] == 0
    assert did["most_bytes"] == 0


def test_held_values_are_no_escapes():
    modules, x = blocks(2), torch.randn(X, requires_grad=True)
    with replays_ahead():
        ebb.reset_stats()
        chain(modules, x).sum().backward()
        ahead = ebb.stats()["total"]["bytes_escaped"]
    ebb.reset_stats()
    chain(modules, x).sum().backward()
    assert ahead == ebb.stats()["total"]["bytes_escaped"]


def test_escapes_may_be_emptied():
    x = torch.randn(64, requires_grad=True)
    kept = []

    def body(h):
        kept.append(h.exp())
        return (kept[-1] * 2).sin().exp()

    expected = torch.autograd.grad(body(x).sum(), x)
    with replays_ahead():
        h = x
        with ebb.region(ebb.policies.recompute_all, escapes="placeholder") as entered:
            h = body(h)
            entered.returns(h)
        found = torch.autograd.grad(h.sum(), x)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(kept[1], kept[0])


def test_traces_tell_what_ran_ahead():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    with replays_ahead(), ebb.record_reports():
        chain(modules, x).sum().backward()
        wait_for_replays()
        spans = ebb.report().spans

    threads = {span[0]: span[4] for span in spans}
    assert threads["replay ahead"] != threads["region"]
    assert "replay" not in threads


def written_over(x):
    h = x.exp() * 2
    dropped = h.sin()
    del dropped
    with torch.no_grad():
        h = h.detach().fill_(3.0)
    return (x * h).sin()


def written_through_an_alias(x):
    """Eager's backward sees that, since the alias has a version of its own."""
    y = x * 1.5
    y.data.add_(1)
    y = y * 2
    h = y.sin()
    y.data.add_(1)
    return h


@pytest.mark.parametrize("body", [written_over, written_through_an_alias])
def test_what_no_handle_needs_is_not_made(body):
    x = torch.randn(X, requires_grad=True)

    def replays():
        ebb.reset_stats()
        with region():
            h = body(x)
        with region():
            h = WaitInBackward.apply(h).exp()
        h.sum().backward()
        return ebb.stats()["total"]["ops_replayed"]

    expected = replays()
    with replays_ahead():
        assert replays() == expected


def test_where_backward_went_elsewhere_nothing_is_waited_for():
    """What was replayed in vain lives on, and is no reason to replay nothing else."""
    modules, x = blocks(4), torch.randn(X, requires_grad=True)

    def program():
        early = chain(modules[:2], x)
        loss = chain(modules[2:3], early).sum()
        torch.autograd.grad(loss, early)
        wait_for_replays()
        did = counts(lambda: chain(modules, x).sum().backward())
        del early, loss
        return did

    with replays_ahead():
        did = program()
    assert did["regions_in_time"] == 3

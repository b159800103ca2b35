"""PAGE and replays ahead of backward: pages come back ahead, and to paging all is as without."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb_tests.programs.ahead import (
    WaitInBackward,
    WaitingLayers,
    counts,
    in_backward,
    many_products,
)
from ebb_tests.programs.paged import PRODUCTS, Mlp, Seen, fresh, gradients, same
from ebb_tests.replays import replays_ahead, wait_for_replays

STEPS = {
    "in order": ebb.experimental.paging.step,
    "in any order": lambda: ebb.experimental.paging.step(False),
    "not bracketed": contextlib.nullcontext,
}
MASKS = ebb.Policy({"aten::gt": ebb.PAGE})


def products():
    return ebb.region(PRODUCTS)


def with_and_without(program, **settings):
    """What `program` gives, and what paging says then, without replays ahead; the same with them;
    and what those did."""
    found = []

    def run():
        before = ebb.stats()["paging"]["steps"]
        outcome = program()
        gc.collect()  # what an exception holds
        stats = ebb.stats()["paging"]
        found.append((outcome, stats | {"steps": stats["steps"] - before}))

    with fresh(**settings):
        run()
    with fresh(**settings), replays_ahead():
        did = counts(run)
    return *found, did


def same_with_and_without(program, **settings):
    """Checks that both are the same. Returns what is found with replays ahead, and their counts."""
    expected, found, did = with_and_without(program, **settings)
    assert found == expected
    return found, did


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    gc.collect()
    wait_for_replays()
    assert ebb.stats()["ahead"]["bytes"] == 0


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_all_but_the_last_layer_are_there_in_time(step, prefetch):
    net = WaitingLayers()
    x, n = net.inputs(0), net.live(20)
    right = gradients(net, x, n)

    def program():
        good = []
        for _ in range(4):
            with step():
                good.append(same(right, gradients(net, x, n, products)))
            good.append(ebb.experimental.paging.step_ok())
        return good

    found, did = same_with_and_without(program, prefetch=prefetch)
    assert all(found[0])
    assert did["regions_held"] == 4
    assert did["regions_in_time"] == 2 * 4
    assert did["regions_stopped"] == did["regions_late"] == did["failures"] == 0


def two_stages(one, other, n, seen):
    """The second stage's backward, then another micro-batch's forward, then the first stage's."""
    halves, begun = {}, ebb.stats()["paging"]["steps"]

    def forward(net, name, batch, x):
        with ebb.region(PRODUCTS, name):
            h = ebb.experimental.mark_rows(x.mul(1.5), n)
            halves[name, batch] = (x, net.layer(h, 0))

    def backward(name, batch):
        y = halves[name, batch][1]
        lives = torch.arange(len(y)).unsqueeze(1) < n
        gradient = halves["other", batch][0].grad if name == "one" else y.detach() * lives
        y.backward(gradient)
        wait_for_replays()
        stats = ebb.stats()["paging"]
        seen.append(stats | {"steps": stats["steps"] - begun})

    def stages(batch):
        forward(one, "one", batch, one.inputs(batch))
        forward(other, "other", batch, halves["one", batch][1].detach().requires_grad_())
        backward("other", batch)

    stages(0)
    stages(1)
    backward("one", 0)
    stages(2)
    backward("one", 2)
    backward("one", 1)
    weights = [*one.weights, *other.weights]
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_backward_begins_where_it_does_and_nothing_is_back_before(step, prefetch):
    """Schedules, steps that end by themselves, and pools are as if nothing came back ahead."""
    one, other = Mlp(layers=1), Mlp(layers=1, seed=1)
    n = torch.tensor(20)

    def program():
        seen, gradients_of_steps = [], []
        for _ in range(3):
            with step():
                gradients_of_steps.append(two_stages(one, other, n, seen))
            seen.append(ebb.experimental.paging.step_ok())
        assert all(same(gradients_of_steps[0], each) for each in gradients_of_steps)
        return seen

    _, did = same_with_and_without(program, prefetch=prefetch, headroom=4.0)
    assert did["regions_in_time"] == 3 * 3
    assert did["regions_stopped"] == did["failures"] == 0


@pytest.mark.parametrize("mode", ["deferred", "blocking", "assert"])
def test_overflows_are_told_as_without(mode):
    net = WaitingLayers()
    x = net.inputs(0)

    def program():
        outcomes = []
        for live in (5, 5, 40, 40, 5, 40):
            n = net.live(live)
            right = gradients(net, x, n)
            try:
                outcomes.append(same(right, gradients(net, x, n, products)))
            except (ebb.experimental.PageOverflowError, RuntimeError) as error:
                outcomes.append((type(error), str(error).partition("\n")[0]))
            outcomes.append(ebb.experimental.paging.step_ok())
        return outcomes

    found, did = same_with_and_without(program, overflow=mode)
    assert False in found[0]
    assert did["regions_in_time"] > 0
    assert did["failures"] == 0


def masked(x, live, between, names=("mask", "next")):
    """Two losses. The first one needs a mask again, which was paged; the other one does not."""
    with ebb.region(MASKS, names[0]):
        h = ebb.experimental.mark_rows(x * 1, torch.tensor(live))
        y = (h * 1.5) * ((h > 0) * 1.5).square()
        other = (x * 3).sin()
    with ebb.region(ebb.policies.recompute_all, names[1]):
        return between(y).exp().exp()[:live].sum(), between(other).sin().sum()


@pytest.mark.parametrize("asks", [True, False])
def test_what_has_no_nan_raises_where_it_is_asked_for(asks):
    """Integers that are garbage look like something. Who does not ask for them hears nothing."""
    x = torch.randn(32, 4, requires_grad=True)

    def program():
        masked(x, 2, WaitInBackward.apply)[0].backward()
        losses = masked(x, 30, WaitInBackward.apply)
        try:
            losses[0 if asks else 1].backward()
            outcome = "fine"
        except ebb.experimental.PageOverflowError as error:
            outcome = str(error)
        del losses
        return outcome, ebb.experimental.paging.step_ok()

    found, did = same_with_and_without(program)
    assert ("cannot be restored" in found[0][0]) == asks
    assert found[0][1] is False
    assert did["failures"] == 0
    assert did["regions_stopped"] > 0


def test_what_goes_wrong_meanwhile_is_told_when_backward_arrives():
    """What came back ahead is right; but backward would have asked for it now."""
    x = torch.randn(32, 4, requires_grad=True)

    def overflow():
        wait_for_replays()
        if not kept:
            kept.append(masked(x, 30, lambda y: y, ("more", "most")))

    kept = []

    def program():
        masked(x, 2, lambda y: y)[0].backward()
        loss = masked(x, 2, lambda y: in_backward(y, overflow))[0]
        outcomes = []
        for _ in range(2):
            with pytest.raises(
                ebb.experimental.PageOverflowError, match="cannot be restored"
            ) as raised:
                loss.backward(retain_graph=True)
            outcomes.append(str(raised.value))
        kept.clear()
        del loss
        return outcomes, ebb.experimental.paging.step_ok()

    _, did = same_with_and_without(program)
    assert did["regions_in_time"] >= 1


def test_a_pool_that_is_gone_is_told_of_when_backward_arrives():
    x = torch.randn(32, 4, requires_grad=True)

    def program():
        masked(x, 2, lambda y: y)[0].backward()
        loss = masked(x, 2, lambda y: in_backward(y, begin_next_step))[0]
        with pytest.raises(RuntimeError, match="its page pool failed in the meantime"):
            loss.backward()
        del loss

    def begin_next_step():
        wait_for_replays()
        masked(x, 30, lambda y: y, ("more", "most"))
        assert not ebb.experimental.paging.step_ok()
        masked(x, 2, lambda y: y, ("more", "most"))

    _, did = same_with_and_without(program)
    assert did["regions_in_time"] >= 1


def test_a_region_that_backward_never_reaches():
    """What came back ahead counts as away until the graph is dropped."""
    net = WaitingLayers()
    x, n = net.inputs(0), net.live(20)

    def program():
        seen = []
        for _ in range(3):
            with ebb.experimental.paging.step(False):
                h, last = x, None
                for index in range(3):
                    last = h
                    with products():
                        h = net.layer(ebb.experimental.mark_rows(h.mul(1.5), n), index)
                torch.autograd.grad(h[:20].sum(), last)
                wait_for_replays()
                seen.append(ebb.stats()["paging"]["stashes"])
                del h, last
                gc.collect()
                seen.append(ebb.stats()["paging"]["stashes"])
            assert ebb.experimental.paging.step_ok()
        return seen

    found, did = same_with_and_without(program)
    assert found[0][0] > 0
    assert found[0][1] == 0
    assert did["regions_in_vain"] == 3


@pytest.mark.parametrize("room", [0, 3, 9, 100])
def test_the_limit_holds_and_what_has_been_read_is_given_back(room):
    """Each product comes back for one operator that nothing else waits for."""
    weights = [torch.randn(8, 8) / 3 for _ in range(8)]
    x, n = torch.randn(40, 8, requires_grad=True), torch.tensor(20)
    nbytes = 40 * 8 * 4
    seen = []

    def program(entered=contextlib.nullcontext):
        h = x
        for _ in range(3):
            with entered():
                h = many_products(WaitInBackward.apply(h), n, weights)
            h.register_hook(lambda gradient: seen.append(ebb.stats()["ahead"]["bytes"]))
        return torch.autograd.grad(h[:20].sum(), x)

    right = program()
    with fresh(), replays_ahead(limit=room * nbytes):
        for _ in range(3):
            found = []
            did = counts(lambda found=found: found.extend(program(products)))
            assert same(right, found)
    assert max(seen) <= room * nbytes
    assert did["regions_in_time"] == (2 if room >= 9 else 0)


def test_what_has_been_read_makes_room_for_what_is_fetched_next():
    weights = [torch.randn(8, 32) / 3 for _ in range(4)]
    x, n = torch.randn(40, 8, requires_grad=True), torch.tensor(20)
    wide = 40 * 32 * 4

    def program(entered=contextlib.nullcontext):
        h = x
        for _ in range(2):
            with entered():
                h = ebb.experimental.mark_rows(WaitInBackward.apply(h).mul(1.5), n)
                sums = [(h @ weight).sum(1, keepdim=True).sin() for weight in weights]
                h = h + torch.stack(sums).sum(0)
        return torch.autograd.grad(h[:20].sum(), x)

    right = program()
    found = []
    with fresh(), replays_ahead(limit=2 * wide - 1):
        did = counts(lambda: found.extend(program(products)))
    assert same(right, found)
    assert did["regions_in_time"] == 1


def test_what_the_program_holds_is_not_copied_back():
    net = WaitingLayers()
    x, n = net.inputs(0), net.live(20)
    held = []

    def hold(tensor):
        held.append(tensor)
        return tensor

    def program():
        results = []
        for _ in range(3):
            h = x
            for index in range(3):
                with products():
                    up = hold(
                        ebb.experimental.mark_rows(WaitInBackward.apply(h).mul(1.5), n)
                        @ net.weights[0]
                    )
                    h = (up * 2).sin() * (index + 1)
            (gradient,) = torch.autograd.grad(h[:20].sum(), x)
            results.append(gradient[:20])
            held.clear()
        return [result.tolist() for result in results]

    _, did = same_with_and_without(program)
    assert did["regions_in_time"] > 0
    assert did["failures"] == 0


def padded_rows():
    """Rows, how many of them are valid, and weights."""
    x, n = torch.randn(40, 8, requires_grad=True), torch.tensor(20)
    return x, n, [torch.randn(8, 8) / 3 for _ in range(2)]


def two_regions(x, n, weights):
    """The first one pages products; backward waits for replays when it has run in the second."""
    with products():
        h = many_products(x, n, weights)
    with ebb.region(ebb.policies.recompute_all):
        return WaitInBackward.apply(h).exp().sin()


def test_a_step_ends_when_all_has_come_back_ahead():
    """Nothing of it was asked for but what had come back; then somebody drops the rest."""
    x, n, weights = padded_rows()

    def program():
        for _ in range(3):
            with products():
                dropped = many_products(x, n, weights)
            out = two_regions(x, n, weights)
            torch.autograd.grad(out[:20].sum(), x)
            del dropped, out
            gc.collect()
            assert ebb.experimental.paging.step_ok()

    found, did = same_with_and_without(program)
    assert found[1]["steps"] == 3
    assert did["regions_in_time"] == 3


def test_what_has_died_has_no_backward():
    """Nobody could ask for anything that the region has paged."""
    x = torch.randn(32, 4, requires_grad=True)

    def program():
        for _ in range(3):
            with ebb.experimental.paging.step():
                loss = masked(x, 8, lambda y: y)[1]
                gc.collect()
                loss.backward()

    found, _ = same_with_and_without(program, prefetch=1)
    assert found[1]["schedule"] == [
        f"forward of '{name}', stage 0, micro-batch 0" for name in ("mask",)
    ]


@pytest.mark.parametrize("asks", [False, True])
def test_who_holds_a_mask_hears_nothing_of_its_pool(asks):
    """Nothing has to come back."""
    x = torch.randn(32, 4, requires_grad=True)

    def forward(live):
        with ebb.region(MASKS, "mask"):
            h = ebb.experimental.mark_rows(x * 1, torch.tensor(live))
            mask = h > 0
            y = (h * 1.5) * (mask * 1.5).square()
        with ebb.region(ebb.policies.recompute_all, "next"):
            z = WaitInBackward.apply(y).exp().exp()[:live].sum()
        return z, mask if asks else None

    def program():
        outcomes = []
        for live in (2, 30):
            loss, mask = forward(live)
            try:
                loss.backward()
                outcomes.append("fine")
            except ebb.experimental.PageOverflowError:
                outcomes.append("an overflow")
            del loss, mask
            outcomes.append(ebb.experimental.paging.step_ok())
        return outcomes

    found, did = same_with_and_without(program)
    assert found[0] == ["fine", True, "fine" if asks else "an overflow", False]
    assert did["failures"] == 0


def test_where_backward_arrives_no_mode_sees_anything():
    """A step that is recorded ends there: pools are made, and errors are on their way."""
    x, n, weights = padded_rows()

    def program():
        ebb.experimental.paging.reset()
        out = two_regions(x, n, weights)
        with Seen() as seen:
            torch.autograd.grad(out[:20].sum(), x)
        assert ebb.stats()["paging"]["pools"]
        return sorted(seen.names)

    expected, found, did = with_and_without(program)
    assert found[0] == expected[0]
    assert did["regions_in_time"] == 1


def test_a_step_that_cannot_end_where_backward_arrives():
    """What has come back is there when it is asked for again."""
    x, n, weights = padded_rows()

    def program():
        out = two_regions(x, n, weights)
        total = out[:20].sum()
        with pytest.raises(ValueError, match=r"device_limit, .* is too small"):
            torch.autograd.grad(total, x, retain_graph=True)
        gradient = torch.autograd.grad(total, x)[0]
        assert ebb.stats()["paging"]["stashes"] == 0
        return gradient[:20].tolist()

    _, did = same_with_and_without(program, device_limit=16)
    assert did["regions_in_time"] == 1

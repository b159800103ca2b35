"""OFFLOAD and PAGE in CUDA graphs, after and between steps that are not captured."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.gpus import (
    MIB,
    NEEDS_GPU,
    REPLAYS_GRAPHS,
    Paged,
    assert_ended_well,
    chain,
    eager_region,
    leaf,
    notice_finished_copies,
    offload_region,
    offloading,
    page_region,
    run_in_a_process,
    same,
    warmed_up_stream,
)

pytestmark = NEEDS_GPU

ROWS, MOST = 512, 400
REPLAYS = 100


@pytest.fixture
def offloads():
    """OFFLOAD with few bytes in flight."""
    with offloading(in_flight_bytes=8 * MIB):
        yield


class Offloaded:
    """A model of elementwise ops and one weight, whose activations are offloaded."""

    def __init__(self):
        self.x = leaf().detach()
        self.weight = torch.randn(MIB, device="cuda", requires_grad=True)

    def loss(self, region):
        with region():
            return chain(self.x * self.weight).square().sum()

    def gradients(self, region):
        return torch.autograd.grad(self.loss(region), [self.weight])

    def parameters(self):
        return [self.weight]

    def new_data(self, _):
        self.x.copy_(torch.randn_like(self.x))


class Captured(Paged):
    def __init__(self):
        super().__init__(valid=MOST)

    def parameters(self):
        return self.weights

    def new_data(self, i):
        self.set(0 if i % 17 == 5 else (i * 61 + 3) % (MOST + 1))


KINDS = {"offload": (Offloaded, offload_region), "page": (Captured, page_region)}
kinds = pytest.mark.parametrize(("make", "region"), KINDS.values(), ids=KINDS)
own_stream = pytest.mark.parametrize("own", [False, True], ids=["another stream", "same stream"])


def capture(stream, work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    return graph, result


def assert_replays_are_right(graph, found, model):
    for i in range(5):
        model.new_data(i)
        graph.replay()
        assert same(found, model.gradients(eager_region))


def whole_step(model, optimizer, region):
    optimizer.zero_grad()
    model.loss(region).backward()
    optimizer.step()


@REPLAYS_GRAPHS
@kinds
@own_stream
@pytest.mark.usefixtures("offloads")
def test_a_capture_after_whole_steps_replays_with_other_data(make, region, own):
    """Among the replays there are eager steps, with ebb and without, and steps of the optimizer."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    side = warmed_up_stream(lambda: whole_step(model, optimizer, region))

    graph, found = capture(side if own else None, lambda: model.gradients(region))

    for i in range(REPLAYS):
        model.new_data(i)
        expected = model.gradients(eager_region)
        graph.replay()
        assert same(found, expected), f"replay {i}"
        if i % 10 == 4:
            assert same(model.gradients(region), expected), f"eager step after replay {i}"
        if i % 10 == 7:
            whole_step(model, optimizer, region)
    assert region is offload_region or ebb.experimental.paging.step_ok()


@REPLAYS_GRAPHS
@kinds
@own_stream
@pytest.mark.usefixtures("offloads")
def test_a_forward_without_a_backward_before_the_capture(make, region, own):
    model = make()
    side = warmed_up_stream(lambda: model.gradients(region))
    with torch.cuda.stream(side):
        for _ in range(2):
            model.loss(region)
    torch.cuda.synchronize()

    graph, found = capture(side if own else None, lambda: model.gradients(region))

    assert_replays_are_right(graph, found, model)


@REPLAYS_GRAPHS
@pytest.mark.usefixtures("offloads")
def test_a_backward_to_some_inputs_only_before_the_capture():
    """It leaves stashes behind that nothing has fetched."""
    model = Offloaded()
    other = leaf()

    def part():
        with offload_region():
            loss = chain(other).sum() + chain(model.weight).sum()
        return torch.autograd.grad(loss, model.weight)

    side = warmed_up_stream(lambda: (model.gradients(offload_region), part()))

    graph, found = capture(side, lambda: model.gradients(offload_region))

    assert_replays_are_right(graph, found, model)


@REPLAYS_GRAPHS
@pytest.mark.usefixtures("offloads")
def test_an_eager_forward_before_a_replay_and_its_backward_after_it():
    """The graph's host memory is its own: what the eager forward sent away stays as it was."""
    model = Offloaded()
    side = warmed_up_stream(lambda: model.gradients(offload_region))
    graph, found = capture(side, lambda: model.gradients(offload_region))
    y = leaf()
    expected_of_y = torch.autograd.grad(chain(y).sum(), y)[0]

    for i in range(10):
        model.new_data(i)
        with offload_region():
            loss = chain(y).sum()
        graph.replay()
        assert torch.equal(torch.autograd.grad(loss, y)[0], expected_of_y)
        assert same(found, model.gradients(eager_region))


@REPLAYS_GRAPHS
@pytest.mark.usefixtures("offloads")
def test_two_graphs_replay_at_once():
    models = [Offloaded() for _ in range(2)]
    captured = []
    for model in models:
        side = warmed_up_stream(lambda model=model: model.gradients(offload_region))
        captured.append(capture(side, lambda model=model: model.gradients(offload_region)))
    streams = [torch.cuda.Stream() for _ in captured]

    for i in range(10):
        for model in models:
            model.new_data(i)
        torch.cuda.synchronize()
        for stream, (graph, _) in zip(streams, captured, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for model, (_, found) in zip(models, captured, strict=True):
            assert same(found, model.gradients(eager_region))


@REPLAYS_GRAPHS
def test_host_memory_that_a_graph_writes_to_stays():
    with offloading(in_flight_bytes=8 * MIB):
        model = Offloaded()
        side = warmed_up_stream(lambda: model.gradients(offload_region))
        graph, found = capture(side, lambda: model.gradients(offload_region))
        ebb.config.offload.pinned_limit = 0
        ebb.config.offload.pinned_limit = 64 * MIB
        y = leaf(8)
        expected_of_y = torch.autograd.grad(chain(y).sum(), y)[0]

        for i in range(5):
            model.new_data(i)
            with offload_region():
                loss = chain(y).sum()
            notice_finished_copies()
            graph.replay()
            assert torch.equal(torch.autograd.grad(loss, y)[0], expected_of_y)
            assert same(found, model.gradients(eager_region))


@REPLAYS_GRAPHS
@pytest.mark.parametrize("load", [MOST, ROWS], ids=["fits", "overflows"])
def test_a_whole_step_is_captured_with_its_optimizer(load):
    """`found_inf` keeps a capturable optimizer from using gradients of a step without room."""
    torch.manual_seed(0)
    ours = Captured()
    torch.manual_seed(0)
    theirs = Captured()
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
        for model in (ours, theirs)
    ]

    def step():
        optimizers[0].zero_grad()
        ours.loss(page_region).backward()
        optimizers[0].found_inf = ebb.experimental.paging.found_inf("cuda")
        optimizers[0].step()

    side = warmed_up_stream(step)
    for _ in range(3):
        whole_step(theirs, optimizers[1], eager_region)
    graph, _ = capture(side, step)
    assert same(ours.parameters(), theirs.parameters())

    for i in range(20):
        ours.new_data(i)
        theirs.x.copy_(ours.x)
        theirs.count.copy_(ours.count)
        graph.replay()
        whole_step(theirs, optimizers[1], eager_region)
        assert same(ours.parameters(), theirs.parameters()), f"replay {i}"

    ours.count.fill_(load)
    before = [p.detach().clone() for p in ours.parameters()]
    graph.replay()
    assert ebb.experimental.paging.step_ok() == (load == MOST)
    assert same(ours.parameters(), before) == (load == ROWS)


AFTER_A_FAILURE = """
import torch, ebb
from ebb_tests.gpus import MIB, OFFLOAD_ALL, chain, leaf
ebb.config.update(offload_min_bytes=0, offload_in_flight_bytes=8 * MIB)
x = leaf()
expected = torch.autograd.grad(chain(x).sum(), x)[0]
def forward():
    with ebb.region(OFFLOAD_ALL):
        return chain(x).sum()
for _ in range(2):
    torch.autograd.grad(forward(), x)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss = forward()
        raise KeyError("the user's own")
except (KeyError, RuntimeError):
    pass
loss = None
torch.cuda.synchronize()
for _ in range(3):
    assert torch.equal(torch.autograd.grad(forward(), x)[0], expected)
"""


@REPLAYS_GRAPHS
def test_eager_steps_are_right_after_a_capture_that_failed():
    assert_ended_well(run_in_a_process(AFTER_A_FAILURE))


class Recomputed(torch.nn.Module):
    """Two layers in a region that recomputes everything."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU()
        )

    def forward(self, x):
        with ebb.region(ebb.policies.recompute_all):
            return self.layers(x)


@REPLAYS_GRAPHS
def test_forward_and_backward_in_captures_of_their_own():
    """The backward's capture recomputes for the forward's."""
    torch.manual_seed(0)
    model = Recomputed().cuda()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,), allow_unused_input=True)
    for _ in range(3):
        fresh = torch.randn(8, 64, device="cuda", requires_grad=True)
        found = torch.autograd.grad(graphed(fresh).square().sum(), [fresh, *model.parameters()])
        expected = torch.autograd.grad(
            model.layers(fresh).square().sum(), [fresh, *model.parameters()]
        )
        assert same(found, expected)


def test_what_only_a_capture_has_recomputed_is_an_error_outside():
    x = leaf()

    def loss():
        with ebb.region(ebb.policies.recompute_all):
            return chain(x).sum()

    stream = warmed_up_stream(lambda: torch.autograd.grad(loss(), x))
    with torch.cuda.stream(stream):
        kept = loss()
    torch.cuda.synchronize()
    capture(stream, lambda: torch.autograd.grad(kept, x, retain_graph=True))
    with (
        torch.cuda.stream(stream),
        pytest.raises(RuntimeError, match="recomputed inside a CUDA graph capture"),
    ):
        torch.autograd.grad(kept, x)

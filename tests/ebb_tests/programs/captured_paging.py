"""Shared by the tests of PAGE in graphs: a step that can be captured."""

from __future__ import annotations

import contextlib

import torch

import ebb
from ebb_tests import device as late
from ebb_tests.programs.paged import Masked, gradients, region, same


class Graph(late.Graph):
    """A graph of a step. After a replay the step's `found` has the gradients of the graph."""

    def __init__(self, step):
        super().__init__()
        self.step, self.found = step, None

    def replay(self):
        super().replay()
        self.step.found = self.found


class Step:
    """A step for graph captures: its inputs keep their addresses; `found` has its gradients."""

    def __init__(self, device, live=30, **options):
        self.net = Masked(device=device, **options)
        self.x, self.n = self.net.inputs(0), self.net.live(live)
        self.stream = torch.Stream(device=device)
        self.found = None

    def set(self, live, seed=0):
        with torch.no_grad():
            self.n.copy_(torch.tensor(live))
            self.x.copy_(self.net.inputs(seed))

    def forward(self):
        return self.net(self.x, self.n, region)

    def run(self):
        self.found = gradients(self.net, self.x, self.n, region)

    def warm(self, times=3, then=None):
        for _ in range(times):
            with self.stream:
                self.run()
                if then:
                    then()

    @contextlib.contextmanager
    def capturing(self):
        """Captures the with-block."""
        graph = Graph(self)
        with graph.capture(self.stream):
            yield graph
        graph.found = self.found

    def capture(self, fails=False):
        with self.capturing() as graph:
            self.run()
            if fails:
                raise KeyError("the program's own")
        return graph

    def capture_forward(self, kept):
        """Captures a forward and raises before the capture ends. Appends the loss to `kept`."""
        with self.capturing():
            kept.append(self.forward())
            raise KeyError("the program's own")

    def is_right(self):
        late.synchronize()
        return same(gradients(self.net, self.x, self.n), self.found)

    def assert_right(self, about=""):
        """Eager's gradients, with pages."""
        assert self.is_right(), about
        assert ebb.experimental.paging.step_ok(), about

    def check(self, run, loads):
        """Calls `run` for each number of valid rows."""
        for number, live in enumerate(loads):
            self.set(live, number)
            run()
            self.assert_right(f"{live} valid rows")


class Bracketed(Step):
    def run(self):
        with ebb.experimental.paging.step():
            super().run()


def optimizer_of(step):
    optimizer = torch.optim.SGD(step.net.weights, lr=0.0)

    def act():
        for weight, gradient in zip(step.net.weights, step.found[1:], strict=True):
            weight.grad = gradient
        optimizer.step()
        assert ebb.experimental.paging.step_ok()
        optimizer.zero_grad()

    return act


def trained(device, kind=Step, **options):
    """A step that has run three times with an optimizer, so that page pools are there."""
    step = kind(device, **options)
    step.warm(then=optimizer_of(step))
    return step


def trained_and_captured(device, kind=Step, **options):
    """A step that `trained` gives, and a graph of it."""
    step = trained(device, kind, **options)
    return step, step.capture()


def two_trained(device, live=10):
    """Two steps that have run twice, so that each has pools of its own sizes."""
    steps = Step(device), Step(device, live=live, width=12)
    for _ in range(2):
        with ebb.experimental.paging.step(False):
            for step in steps:
                step.run()
        assert ebb.experimental.paging.step_ok()
    return steps

"""Shared by the tests of PAGE in graphs: a step that can be captured."""

from __future__ import annotations

import accelerator
import torch

import ebb
from paging import Masked, gradients, region, same


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

    def run(self):
        self.found = gradients(self.net, self.x, self.n, region)

    def warm(self, times=3, then=None):
        for _ in range(times):
            with self.stream:
                self.run()
                if then:
                    then()

    def capture(self, fails=False):
        graph = accelerator.Graph()
        with graph.capture(self.stream):
            self.run()
            if fails:
                raise KeyError("the program's own")
        return graph

    def capture_forward(self, kept):
        """Captures a forward and raises before the capture ends. Appends the loss to `kept`."""
        with accelerator.Graph().capture(self.stream):
            kept.append(self.net(self.x, self.n, region))
            raise KeyError("the program's own")

    def is_right(self):
        accelerator.synchronize()
        return same(gradients(self.net, self.x, self.n), self.found)


def optimizer_of(step):
    optimizer = torch.optim.SGD(step.net.weights, lr=0.0)

    def act():
        for weight, gradient in zip(step.net.weights, step.found[1:], strict=True):
            weight.grad = gradient
        optimizer.step()
        assert ebb.paging.step_ok()
        optimizer.zero_grad()

    return act

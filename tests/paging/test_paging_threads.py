"""Threads of the user's while a step that overflowed its page pools is run again."""

from __future__ import annotations

import threading

import pytest
import torch

import ebb
from ebb import _C
from ebb_tests import fork_server
from ebb_tests.other_threads import in_thread
from ebb_tests.programs.paged import EVERYTHING, asks_when_it_dies

X = torch.randn(64, 4)
START = threading.Thread.start


def loss_of(w, live):
    with ebb.region(EVERYTHING):
        h = ebb.experimental.mark_rows((X @ w).clone(), torch.tensor(live))
        return h.sin()[:live].sum()


def warm():
    """A weight, and pools with room for two rows."""
    w = torch.randn(4, 4, requires_grad=True)
    loss_of(w, 2).backward()
    w.grad = None
    return w


def backward_in_another_thread(w, started_by):
    """A backward that another thread runs while a step is about to be run again."""
    go, done = threading.Event(), threading.Event()
    other, factors = torch.ones(3, requires_grad=True), torch.arange(3.0)

    def work():
        go.wait(30)
        (other * factors).sum().backward()
        done.set()

    runs = 0

    def step():
        nonlocal runs
        runs += 1
        if started_by == "the step":
            thread = threading.Thread(target=work)
            thread.start()
        if started_by == "the step" or runs == 1:
            go.set()
            done.wait(30)
        loss_of(w, 60).backward()  # more rows than the pools have room for
        go.clear()
        done.clear()

    if started_by == "somebody else":
        threading.Thread(target=work).start()
    ebb.experimental.paging.run_step(step)
    return runs, other.grad


@pytest.mark.parametrize("started_by", ["the step", "somebody else"])
def test_a_backward_in_another_thread_while_a_step_runs_again(started_by):
    """What somebody else's has computed stays; what the step's own have is redone."""
    w = warm()

    runs, grad = backward_in_another_thread(w, started_by)

    assert runs == 2
    assert torch.equal(grad, torch.arange(3.0))


def restore_torchs_backward(monkeypatch):
    """As ``torch.compiler._patch_engine_backward`` does when it ends."""
    torchs = torch.autograd.graph._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torchs)


def restore_pythons_start_of_threads(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", START)


@pytest.mark.parametrize("restore", [restore_torchs_backward, restore_pythons_start_of_threads])
def test_a_step_that_runs_again_adds_gradients_once_after_other_code_restored_functions(
    monkeypatch, restore
):
    w = warm()
    ebb.experimental.paging.run_step(lambda: None)
    restore(monkeypatch)

    runs, grad = backward_in_another_thread(w, "the step")

    assert runs == 2
    assert torch.equal(grad, torch.arange(3.0))


def test_run_step_refuses_to_run_if_it_cannot_see_threads():
    program = """
import _thread, ebb
start = _thread.start_new_thread
_thread.start_new_thread = lambda *args, **kwargs: start(*args, **kwargs)
ebb.experimental.paging.run_step(lambda: None)
"""
    done = fork_server.run(["-c", program])
    assert done.returncode != 0
    assert "other code has replaced _thread.start_new_thread" in done.stderr


def test_what_dies_with_a_graph_may_ask():
    """What stays is the program's own memory: its finalizers run when the engine's lock has been
    given back."""
    w = torch.randn(4, 4, requires_grad=True)

    def forward():
        with ebb.region(EVERYTHING):
            h = ebb.experimental.mark_rows((X @ w).clone(), torch.tensor(20))
            return h.sin()[:20].sum(), asks_when_it_dies(h.untyped_storage())

    for _ in range(2):
        with ebb.experimental.paging.step():
            forward()[0].backward()
    step = ebb.experimental.paging.step()
    step.__enter__()
    loss, found = forward()
    assert ebb.stats()["paging"]["resident"] == 2
    assert found == []
    del loss
    assert found == [True]
    with pytest.raises(RuntimeError, match="in another order"):
        step.__exit__(None, None, None)


def test_the_pipeline_place_of_a_thread_ends_with_the_thread():
    """A later thread may get the same id."""
    in_thread(lambda: _C.exchange_paging_place(3, 1))
    places = {in_thread(lambda: _C.exchange_paging_place(0, -1)) for _ in range(4)}

    assert places == {(0, -1)}

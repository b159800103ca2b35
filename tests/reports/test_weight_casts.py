"""Weights that autocast casts and caches are named in reports, and only these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401

REASON = "weight cast by autocast, whose cache keeps it until autocast ends"


class Block(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.kind = kind
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "inside":  # the program's own cast, which it keeps
            self.kept = self.up.weight.to(torch.bfloat16)
            x = x + (self.kept * self.kept).sum()
        return x + self.down(nn.functional.gelu(self.up(x))).float()


def report_of(kind="plain", device="cpu", autocast=True, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(3)))
    if kind == "frozen":
        model[1].requires_grad_(False)
    x = torch.randn(8, 16)
    with (
        ebb.record_reports(),
        ebb.apply(model, ebb.policies.recompute_all, "?", escapes=settings.pop("escapes", "keep")),
    ):
        with torch.autocast(device, torch.bfloat16, enabled=autocast, **settings):
            loss = model(x).sum()
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return ebb.report(), model, gradients


def labelled(report):
    return [row for row in report.rows if row.reason.startswith("weight cast")]


def test_cast_weights_are_named_and_freed_without_the_cache():
    report, model, gradients = report_of()

    rows = labelled(report)
    assert {(row.op, row.fate, row.dtype, row.reason) for row in rows} == {
        ("aten::_to_copy.default", "escaped", "bfloat16", REASON)
    }
    weights = 2 * sum(p.numel() for p in model.parameters())
    biases = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    nbytes = sum(row.bytes for row in rows)
    assert weights - biases <= nbytes <= weights
    assert report.totals["escaped"] == nbytes  # nothing else escapes
    (note,) = report.notes
    assert note.startswith(f"{ebb._report.text.size(nbytes)} are weights cast by autocast")
    assert note in str(report)
    assert REASON in str(report)

    without, _, same = report_of(cache_enabled=False)

    assert labelled(without) == []
    assert without.notes == ()
    assert report.held - without.held >= nbytes
    assert all(map(same_bits, gradients, same))


def test_cache_switched_off_for_all_of_autocast_keeps_no_casts():
    torch.set_autocast_cache_enabled(False)
    try:
        report, *_ = report_of()
    finally:
        torch.set_autocast_cache_enabled(True)

    assert report.totals["escaped"] == 0


def test_casts_of_the_program_are_not_named():
    """Inside of autocast and outside of it, of the same weights."""
    for autocast in (True, False):
        report, model, _ = report_of("inside", autocast=autocast)
        own = {row.bytes for row in report.rows if row.fate == "escaped" and not row.reason}
        assert own
        of_autocast = 2 * (sum(p.numel() for p in model.parameters())) if autocast else 0
        assert sum(row.bytes for row in labelled(report)) <= of_autocast
        assert bool(labelled(report)) == autocast


def test_autocast_inside_of_a_region_is_seen():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.down(nn.functional.gelu(self.up(x)))
                self.seen = torch.is_autocast_enabled("cpu")
                return x + y

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inside()

        def forward(self, x):
            # the outer autocast keeps the cache until the region has ended
            with torch.autocast("cpu", enabled=False), ebb.region(ebb.policies.recompute_all):
                return self.inner(x)

    model = Outer()
    with ebb.record_reports():
        loss = model(torch.randn(8, 16)).sum()
        loss.backward()

    assert model.inner.seen
    assert labelled(ebb.report())


def test_frozen_weights_are_not_cached():
    of_all, of_some = (sum(r.bytes for r in labelled(report_of(k)[0])) for k in ("plain", "frozen"))

    assert of_some == of_all * 2 // 3


@pytest.mark.parametrize("policy", ["save_all", "save_matmuls"])
def test_cast_that_the_policy_saves_is_not_named(policy):
    model = nn.Sequential(Block(), Block())
    with ebb.record_reports(), ebb.apply(model, getattr(ebb.policies, policy), "?"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 16)).sum()
        loss.backward()

    assert bool(labelled(ebb.report())) == (policy == "save_matmuls")

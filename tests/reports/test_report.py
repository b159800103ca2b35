"""Reports: each storage in one row, sums that are the allocator's, and files that can be read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.memory_use import allocations
from ebb_tests.one_step_report import Block, blocks, no_reports_yet, recorded, step  # noqa: F401
from ebb_tests.other_threads import run_in_threads


def test_no_report_yet():
    with pytest.raises(RuntimeError, match=r"record_reports\(\).*EBB_REPORT"):
        ebb.report()


def test_rows_of_a_step():
    report = recorded(ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, module="*.up")]))
    found = {(r.module, r.op, r.fate): r for r in report.rows}
    up = found["0.up", "aten::addmm.default", "saved"]
    assert (up.count, up.bytes, up.shape, up.dtype) == (1, 8 * 32 * 4, (8, 32), "float32")
    assert up.rule == "rule 0, 'aten::addmm', in modules that match '*.up'"
    assert (up.region, up.replays, up.reason) == ("0", 0, "")
    act = found["0.act", "aten::silu.default", "recomputed"]
    assert (act.bytes, act.replays, act.rule) == (8 * 32 * 4, 1, "default")
    assert act.replay_seconds > 0
    assert found["0", "aten::add.Tensor", "kept"].bytes == 8 * 16 * 4
    assert found["3", "aten::add.Tensor", "result"].bytes == 8 * 16 * 4
    assert found["0.norm", "from outside", "outside"].shape in [(8, 16), (16,)]
    assert ("0.down", "aten::addmm.default", "saved") not in found


def test_rules_that_decided_on_nothing(tmp_path):
    policy = ebb.Policy(
        [
            ebb.Rule("aten::linear", ebb.SAVE),
            ebb.Rule("aten::addmm", ebb.SAVE, module="*.pu"),
            ebb.Rule("aten::addmm", ebb.SAVE, module="*.down"),
        ]
    )
    report = recorded(policy)
    assert report.idle_rules == (
        "rule 0, 'aten::linear'",
        "rule 1, 'aten::addmm', in modules that match '*.pu'",
    )
    assert "an earlier rule decided): rule 0, 'aten::linear'; rule 1" in str(report)
    assert recorded(ebb.policies.recompute_all).idle_rules == ()


def test_rules_of_a_preset_that_decided_on_nothing_are_not_listed():
    rule = ebb.Rule("aten::exp", ebb.SAVE)
    for preset in (ebb.policies.save_matmuls, ebb.policies.torchtitan):
        assert recorded(preset).idle_rules == ()
        assert recorded(ebb.Policy([rule, *preset.rules])).idle_rules == ("rule 0, 'aten::exp'",)


def test_layers_are_put_together():
    report = recorded(ebb.policies.recompute_all)
    together = report.collapsed()
    alike = {row.module: row.layers for row in together if row.op != "aten::add.Tensor"}
    assert set(alike) >= {"0-3.norm", "0-3.up", "0-3.act"}
    assert set(alike.values()) == {4}
    sums = {(row.module, row.fate, row.layers) for row in together if row.op == "aten::add.Tensor"}
    assert sums == {("0-2", "kept", 3), ("3", "result", 1)}
    for name in ("bytes", "count", "replays"):
        assert sum(getattr(r, name) for r in together) == sum(getattr(r, name) for r in report.rows)
    one = recorded(ebb.policies.recompute_all, blocks(1))
    assert {row.layers for row in one.collapsed()} == {1}


def test_only_numbers_that_are_whole_parts_of_names_are_put_together():
    model = nn.Sequential()
    for name in ("mlp1", "mlp2", "5", "7"):
        model.add_module(name, Block())
    with ebb.record_reports(), ebb.apply(model, modules=["mlp?", "?"]):
        step(model)
    names = {row.region for row in ebb.report().collapsed() if row.op == "aten::silu.default"}
    assert names == {"mlp1", "mlp2", "5,7"}


POLICIES = {
    "recompute_all": ebb.policies.recompute_all,
    "save_all": ebb.policies.save_all,
    "save_matmuls": ebb.policies.save_matmuls,
    "every other": ebb.Policy([ebb.Rule("aten::*", ebb.SAVE, every=2)]),
}


def programs():
    x = torch.randn(8, 16, requires_grad=True)
    w = torch.randn(16, 16, requires_grad=True)
    buffer = torch.randn(8, 16)
    kept = []

    def plain():
        return (x @ w).sin().exp().sum()

    def written():
        h = (x @ w).sin()
        saved = h.exp()
        h = h.clone()
        h.neg_()
        return (h * saved).sum()

    def copied():
        y = (buffer + x).sin()
        buffer.neg_()
        return (y * y).sum()

    def escaping():
        h = (x @ w).sin()
        kept.append(h.exp())
        return (kept[-1] * h).cos().sum()

    def dropout_and_norm():
        h = nn.functional.dropout(nn.functional.layer_norm(x @ w, (16,)), 0.5)
        return nn.functional.gelu(h).sum()

    def several_results():
        values, _ = (x @ w).sort(dim=1)
        return (values * values.cumsum(0)).sum()

    return [plain, written, copied, escaping, dropout_and_norm, several_results]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", range(len(programs())))
def test_what_is_held_is_what_the_allocator_gave(place, policy):
    program = programs()[place]
    with ebb.record_reports():

        def forward():
            with ebb.region(POLICIES[policy]):
                return program()

        forward().backward()  # what is made once, is made
        losses = []
        nbytes = sum(allocations(lambda: losses.append(forward())))
        report = list(ebb._report.report.reports())[-1]
        assert report.held == nbytes
        assert sum(row.bytes for row in report.rows) == sum(report.totals.values())
        losses.pop().backward()
    # `totals` and the counters of ebb.stats() are the same books.
    total = ebb.stats()["total"]
    assert report.totals["copied"] == total["bytes_copied"]
    if place != 3:  # what escapes was dropped and is held: one row, but two counters
        assert report.totals["recomputed"] == total["bytes_dropped"]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_else_changes(policy):
    with ebb.apply(model := blocks(), POLICIES[policy], "?"):
        torch.manual_seed(0)
        expected = step(model)
        stats = ebb.stats()["total"]
        for p in model.parameters():
            p.grad = None
        torch.manual_seed(0)
        with ebb.record_reports():
            found = step(model)
        assert same_bits(found, expected)
        assert ebb.stats()["total"] == stats


def test_the_curves_begin_and_end_at_nothing():
    report = recorded(ebb.policies.recompute_all)
    assert report.timeline[-1][1:] == (0, 0)
    times = [point[0] for point in report.timeline]
    assert times == sorted(times)
    assert max(point[1] for point in report.timeline) == report.peak_held
    assert report.peak_eager > 2 * report.peak_held > 0
    eager = recorded(ebb.policies.save_all)
    assert eager.peak_held >= eager.peak_eager
    assert eager.peak_eager == report.peak_eager


def test_a_long_timeline_keeps_its_peak():
    x = torch.randn(64, requires_grad=True)
    with ebb.record_reports():
        with ebb.region(ebb.policies.save_all):
            y = x
            for _ in range(3000):
                y = y.sin()
        y.sum().backward()
    report = ebb.report()
    assert len(report.timeline) < 2500
    assert max(point[1] for point in report.timeline) == report.peak_held == 2999 * 256


REASONS = {
    "custom operator": lambda x: torch.ops.ebb_report.twice(x),
    "wrote to a tensor from outside of the region": lambda x: outside.copy_(x.detach()) * x,
    "uninitialized memory": lambda x: torch.empty_like(x).detach() * x,
    "written by code that torch does not see": lambda x: opaque_write(x) * x,
    "read before an operator wrote to it": lambda x: torch.ones_like(x) * x,
}
outside = torch.zeros(8, 16)


def opaque_write(x):
    y = x.detach() + 1
    with ebb.opaque(y):
        y.data.view(-1).numpy()[:] = 3
    return y


@pytest.fixture(scope="module")
def library():
    with torch.library._scoped_library("ebb_report", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", torch.library.fallthrough_kernel, "Autograd")
        yield


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("reason", REASONS)
def test_why_a_value_is_kept(reason):
    x = torch.randn(8, 16, requires_grad=True)
    with ebb.record_reports():
        with ebb.region():
            y = REASONS[reason](x.sin())
            y = y.sin().sum() if y.requires_grad else (x * y).sum()
        y.backward()
    kept = [row for row in ebb.report().rows if row.fate in ("kept", "outside") and row.reason]
    assert [reason in row.reason for row in kept] == [True]
    assert reason in str(ebb.report()) or kept[0].fate == "outside"


def test_steps_that_are_kept():
    with ebb.record_reports(steps=2), ebb.apply(model := blocks(1), modules="?"):
        for _ in range(5):
            step(model)
        steps = [report.step for report in ebb._report.report.reports()]
        assert steps == sorted(steps)
        assert len(steps) == 3  # and the one that may be going on
        with torch.no_grad():
            model(torch.randn(8, 16))
        assert ebb.report().step == steps[-1]


def test_what_was_recorded_before_is_another_report():
    x = torch.randn(64, requires_grad=True)
    for _ in range(2):  # no backward in between: one step
        with ebb.record_reports(), ebb.region():
            x.sin().exp()
    with ebb.record_reports(), ebb.region():
        y = x.sin().exp()
    assert [row.count for row in ebb.report().rows if row.op == "aten::exp.default"] == [1]
    assert y.requires_grad


def test_reports_begin_anew_with_statistics():
    with ebb.record_reports(), ebb.apply(model := blocks(1), modules="?"):
        for _ in range(2):
            step(model)
        rows = [(row.module, row.op, row.count, row.bytes) for row in ebb.report().rows]
        ebb.reset_stats()
        ebb.reset_stats()
        assert ebb.report().step == 1
        for number in range(2):
            step(model)
            assert ebb.report().step == ebb.stats()["step"] == number
            found = [(row.module, row.op, row.count, row.bytes) for row in ebb.report().rows]
            assert sorted(found) == sorted(rows)


def test_steps_of_a_profile_push_no_report_out():
    with ebb.record_reports(), ebb.apply(model := blocks(1), modules="?"):
        step(model)
        expected = ebb.report()
        ebb.profile(lambda: step(model), steps=3)
        assert ebb.report() == expected


def test_backward_in_another_thread_and_a_report_meanwhile():
    with ebb.record_reports(), ebb.apply(model := blocks(), modules="?"):
        losses = [model(torch.randn(8, 16)).sum() for _ in range(8)]
        run_in_threads(*(loss.backward for loss in losses), *[ebb.report] * 20)
    assert ebb.report().timeline[-1][1:] == (0, 0)


def test_profilers_see_the_region_of_each_replay():
    """Also of a region in another one, and of one without a name."""
    model, x = blocks(3), torch.randn(8, 16, requires_grad=True)
    with ebb.apply(model, modules="[01]"):
        hidden = model(x)
        with ebb.region(name="outer"):
            hidden = hidden.sin().exp()
            with ebb.region(name="inner"):
                hidden = hidden.cos().sin()
        with ebb.region():
            loss = hidden.sinh().exp().sum()
        with profile(activities=[ProfilerActivity.CPU]) as found, record_function("backward"):
            loss.backward()

    names = {event.name for event in found.events() if event.name.startswith("ebb::replay")}
    for region in "01":
        assert f"ebb::replay {region} aten::silu.default" in names
        assert f"ebb::replay {region} aten::addmm.default" in names
    assert not [name for name in names if name.startswith("ebb::replay 2")]
    assert {"ebb::replay outer aten::sin.default", "ebb::replay inner aten::cos.default"} <= names
    assert "ebb::replay region aten::sinh.default" in names


# Files


def test_a_kept_result_names_the_rule_that_decided():
    """Its operator cannot be replayed, so ebb keeps the result although the rule says RECOMPUTE."""
    x = torch.randn(4, 4, requires_grad=True)
    policy = ebb.Policy({"aten::sin": ebb.RECOMPUTE}, default=ebb.SAVE)
    with ebb.record_reports():
        with ebb.region(policy):
            t = x * 2
            with ebb.opaque(t):
                h = t.sin()
            loss = h.exp().sum()
        loss.backward()
        report = ebb.report()

    (sine,) = [row for row in report.rows if row.op.startswith("aten::sin")]
    assert sine.rule == "rule 0, 'aten::sin'"
    assert "ebb.opaque" in sine.reason
    assert report.idle_rules == ()


def test_experts_with_other_numbers_of_rows_share_a_row():
    """A router gives each expert rows of its own; widths stay apart."""
    experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
    wide = torch.nn.ModuleList(torch.nn.Linear(16, 16 * n) for n in (1, 2))
    model = torch.nn.ModuleDict({"experts": experts, "wide": wide})
    x = torch.randn(10, 16)
    with ebb.record_reports(), ebb.region(ebb.policies.recompute_all, root=model):
        parts = [expert(x[: n + 1]).sin().exp() for n, expert in enumerate(experts)]
        parts += [one(x).sin().exp() for one in wide]
        loss = sum(part.sum() for part in parts)
    loss.backward()
    report = ebb.report()

    rows = [row for row in report.collapsed() if row.op == "aten::addmm.default"]

    assert {row.where: (row.shape, row.layers) for row in rows} == {
        "experts.0-3": ((-1, 16), 4),
        "wide.0": ((10, 16), 1),
        "wide.1": ((10, 32), 1),
    }
    of_experts = next(row for row in rows if row.layers == 4)
    assert of_experts.bytes == sum(4 * 16 * (n + 1) for n in range(4))
    assert "*x16 float32" in str(report)
    assert sum(row.bytes for row in report.collapsed()) == sum(row.bytes for row in report.rows)

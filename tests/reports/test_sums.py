"""Bytes that eager saves, divided by what ebb did with them, in text, JSON and page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ebb
from ebb._report.text import size
from ebb_tests.one_step_report import Block, blocks, no_reports_yet, step  # noqa: F401
from ebb_tests.report_page import can_be_shown, data_of, shown

POLICIES = {
    "recompute_all": ebb.policies.recompute_all,
    "save_matmuls": ebb.policies.save_matmuls,
    "save_all": ebb.policies.save_all,
    "some_of_each": ebb.Policy(
        [ebb.Rule("aten::addmm", ebb.SAVE, every=2), ebb.Rule("aten::silu", ebb.SAVE, nth=1)]
    ),
}


def _eager_bytes(model, x) -> int:
    """Of all storages that autograd saves, and that the program does not hold."""
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held.add(x.untyped_storage().data_ptr())
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    del loss
    return sum(t.untyped_storage().nbytes() for place, t in seen.items() if place not in held)


def _reported(model, x, policy, **settings):
    with ebb.record_reports(), ebb.apply(model, policy, "?", **settings):
        model(x).sum().backward()
    return ebb.report()


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_add_up_to_the_bytes_of_eager(policy):
    model, x = blocks(), torch.randn(8, 16)

    report = _reported(model, x, POLICIES[policy])

    assert report.eager == _eager_bytes(model, x) == report.peak_eager
    parts = {fate: sum(r.eager for r in report.rows if r.fate == fate) for fate in report.FATES}
    assert parts["recomputed"] == report.totals["recomputed"]
    assert parts["outside"] == parts["result"] == parts["unneeded"] == parts["copied"] == 0
    assert parts["saved"] + parts["kept"] + parts["recomputed"] == report.eager
    assert all(row.eager <= row.bytes for row in report.rows)


def test_parts_add_up_with_offloaded_values(accelerator):
    x = torch.randn(8, 16, requires_grad=True)
    with ebb.record_reports():
        with ebb.region(ebb.Policy([ebb.Rule("aten::sin", ebb.OFFLOAD)])):
            loss = x.sin().exp().sin().cos().sum()
        accelerator.advance(100)
        loss.backward()

    report = ebb.report()

    parts = {fate: sum(r.eager for r in report.rows if r.fate == fate) for fate in report.FATES}
    assert parts["offloaded"] + parts["recomputed"] + parts["saved"] + parts["kept"] == report.eager
    assert report.eager == report.peak_eager == 2 * x.nbytes
    assert report.totals["offloaded"] == 2 * x.nbytes
    kinds = {span[0] for span in report.spans}
    assert kinds == {"region", "backward", "offload", "reload", "replay"}


def test_escaped_values_are_named_and_counted_once():
    model, x = blocks(2), torch.randn(8, 16)
    expected = _eager_bytes(model, x)
    model[0].act.register_forward_hook(lambda m, i, o: setattr(m, "seen", o))

    report = _reported(model, x, ebb.policies.recompute_all)

    assert report.eager == expected
    (row,) = [row for row in report.rows if row.fate == "escaped"]
    assert (row.op, row.module) == ("aten::silu.default", "0.act")
    assert row.eager == report.totals["escaped"] == ebb.stats()["total"]["bytes_escaped"] > 0


def test_text_json_and_page_have_the_same_sums(tmp_path):
    report = _reported(blocks(), torch.randn(8, 16), ebb.policies.save_matmuls)

    lines = str(report).splitlines()
    place = next(
        i for i, line in enumerate(lines) if line.endswith("total that eager saves for backward")
    )
    assert lines[place].split()[:2] == size(report.eager).split()
    told = [re.findall(r"[\d.]+ \w*B", line)[1] for line in lines[3:place]]
    parts = [sum(r.eager for r in report.rows if r.fate == fate) for fate in report.FATES]
    fates = [sum(1 for r in report.rows if r.fate == fate) for fate in report.FATES]
    assert told == [size(part) for part, count in zip(parts, fates, strict=True) if count]
    report.save(tmp_path / "r.json")
    report.save(tmp_path / "r.html")
    for found in (json.loads((tmp_path / "r.json").read_text()), data_of(tmp_path / "r.html")):
        assert found["eager"] == sum(row["eager"] for row in found["rows"]) == report.eager
        assert {row["fate"]: 0 for row in found["rows"]}.keys() == {r.fate for r in report.rows}


@can_be_shown
def test_page_shows_the_parts(tmp_path):
    report = _reported(blocks(), torch.randn(8, 16), ebb.policies.save_matmuls)

    page = shown(report, tmp_path)

    shares = {
        fate: int(nbytes)
        for nbytes, fate in re.findall(r"flex:(\d+);background:var\(--(\w+)\)", page["sum"].html)
    }
    assert sum(shares.values()) == report.eager
    assert shares["recomputed"] == report.totals["recomputed"]
    assert f"= {size(report.eager)} that eager saves for backward" in page["legend"].html


class Twice(nn.Module):
    def forward(self, x):
        first = x.sin()
        return first.exp() + first.cos()


def test_rows_have_the_line_of_the_program():
    model, x = nn.Sequential(Twice()), torch.randn(4, 4, requires_grad=True)

    report = _reported(model, x, ebb.policies.recompute_all)

    first = Twice.forward.__code__.co_firstlineno
    lines = {row.op: row.source for row in report.rows if row.op != "from outside"}
    assert lines["aten::sin.default"] == f"{__file__}:{first + 1}"
    assert lines["aten::exp.default"] == f"{__file__}:{first + 2}"
    (sin,) = [row for row in report.rows if row.op == "aten::sin.default"]
    assert [frame.rpartition(" in ")[2] for frame in sin.stack[:3]] == [
        "forward",
        "_reported",
        "test_rows_have_the_line_of_the_program",
    ]
    own = f"{Path(ebb.__file__).parent}/"
    assert not any("/torch/" in frame or frame.startswith(own) for frame in sin.stack)


def test_json_has_each_stack_once():
    model = Block()
    with ebb.record_reports(), ebb.apply(model, ebb.policies.save_all, ""):
        step(model)
    added = [row for row in ebb.report().rows if row.source]
    assert added
    found = ebb.report().to_dict()
    stacks = [tuple(stack) for stack in found["stacks"]]
    assert [stacks[row["stack"]] for row in found["rows"]] == [r.stack for r in ebb.report().rows]
    assert len(set(stacks)) == len(stacks)

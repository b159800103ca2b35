"""Settings of replays ahead, reports on them, and setters of torch that wait for them."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
import torch

import ebb
from ebb import _testing
from ebb._region import global_state_guard
from ebb_tests import fork_server
from ebb_tests.programs.ahead import WaitInBackward, X, blocks
from ebb_tests.replays import replays_ahead

ASKS = "import torch, json, ebb; print(json.dumps(ebb.config.to_dict()))"


def settings_of_a_job(value):
    done = fork_server.run(
        ["-W", "ignore", "-c", ASKS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "EBB": "1", "EBB_AHEAD": value},
        check=True,
    )
    return json.loads(done.stdout), done.stderr


SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("value", "regions", "limit"),
    [
        ("512MiB", 1, 2**29),
        pytest.param("", 0, 2**30, marks=SWEEP),
        pytest.param("0", 0, 2**30, marks=SWEEP),
        pytest.param("3", 3, 2**30, marks=SWEEP),
        ("auto", 0, None),  # None: an invalid value, which is reported
        pytest.param("-1", 0, None, marks=SWEEP),
        pytest.param("1 mile", 0, None, marks=SWEEP),
    ],
)
def test_environment_variable_sets_regions_and_limit(value, regions, limit):
    found, errors = settings_of_a_job(value)

    assert found["ahead.regions"] == regions
    assert limit is None or found["ahead.limit"] == limit
    assert (f"EBB_AHEAD={value}" in errors) == (limit is None)
    assert ("EBB_AHEAD" in errors) == (limit is None)


def report_of(regions):
    """The report of a step with five blocks."""
    modules, h = blocks(5), torch.randn(X, requires_grad=True)
    with replays_ahead(regions), ebb.record_reports():
        for i, module in enumerate(modules):
            with ebb.region(ebb.policies.recompute_all, name=f"blocks.{i}"):
                h = module(WaitInBackward.apply(h))
        h.sum().backward()
        return ebb.report()


def test_report_counts_what_ran_ahead(tmp_path):
    report = report_of(1)

    assert report.ahead.keys() == set(_testing.fields()["ReportAhead"])
    assert report.ahead == {"in_time": 4, "late": 0, "in_vain": 0, "held": 1, "stopped": 0}
    again = [row for row in report.rows if row.replays]
    assert sum(row.ahead_seconds for row in again) > 0
    for row in again:
        assert row.replays_ahead == row.replays
        assert row.ahead_seconds == row.replay_seconds
    assert {row.region for row in again} == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    assert "regions: 4 in time, 1 not freed\n" in report.text()
    (line,) = [line for line in report.text().splitlines() if line.startswith("replayed ahead")]
    first, second = (
        line.partition("; ")[0].removeprefix("replayed ahead of backward: ").split(" of ")
    )
    assert first == second

    together = report.collapsed()  # rows that are put together add up
    assert len(together) < len(report.rows)
    for figure in ("replays_ahead", "ahead_seconds"):
        one, other = (sum(getattr(row, figure) for row in rows) for rows in (report.rows, together))
        assert abs(one - other) < 1e-9

    report.save(tmp_path / "report.json")
    report.save(tmp_path / "report.html")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["ahead"]["in_time"] == 4
    assert sum(row["replays_ahead"] for row in data["rows"]) > 0
    assert '"in_time": 4' in (tmp_path / "report.html").read_text()


def test_report_without_replays_ahead_has_none():
    report = report_of(0)

    assert not any(report.ahead.values())
    assert sum(row.replays for row in report.rows) > 0
    assert all(row.replays_ahead == 0 and row.ahead_seconds == 0 for row in report.rows)
    assert "replayed ahead" not in report.text()


# Setters of torch._C that need not wait, and why.
HARMLESS = re.compile(
    r"_set_(autograd_fallback_mode|backcompat_\w+|cached_tensors_enabled|dispatch_mode"
    r"|check_sparse_tensor_invariants|conj|neg|default_mobile_cpu_allocator|fwd_grad_enabled"
    r"|fake_constant|storage_data_ptr_access_error_msg|storage_access_error_msg"
    r"|dtensor_allow_implicit_replication|generator_metaclass|grad_enabled|graph_exec\w*"
    r"|grad_layout_enforcement_enabled|graph_executor_optimize|meta_in_tls_dispatch_include"
    r"|multithreading_enabled|only_lift_cpu_tensors|override_stale_capture_stream|print_stack\w+"
    r"|should_use_format_with_string_table|skip_next_torch_function|tensor_metadata|thread_name"
    r"|throw_on_mutable_data_ptr|torch_function_state|tracing_state|value_trace"
    r"|view_replay_enabled|warn\w+|worker_pids|worker_signal_handlers)"
    r"|set_(anomaly_enabled|autocast_\w+|flush_denormal|num_interop_threads|vital)"
)


def test_each_setter_of_torch_waits_or_is_known_to_be_harmless():
    setters = {name for name in dir(torch._C) if re.match(r"_?set_", name)}
    waiting = {name for name in setters if global_state_guard.SETTERS.fullmatch(name)}
    assert setters - waiting == {name for name in setters if HARMLESS.fullmatch(name)}


@SWEEP
def test_watched_functions_keep_their_identity():
    """Tables of a __torch_function__ find them, and programs that have imported one keep it."""
    program = """
import pickle, torch
from torch.overrides import get_testing_overrides, resolve_name

class Seen(torch.Tensor):
    functions = []
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.functions.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})

def known():
    return [(id(function), resolve_name(function)) for function in get_testing_overrides()]

data, setter, before = torch.Tensor.data.__get__, torch._C._set_mkldnn_enabled, known()
import ebb
for regions in (1, 0):
    ebb.config.ahead.regions = regions
    assert known() == before
    Seen.functions.clear()
    t = torch.rand(3).as_subclass(Seen)
    t.data, t.numpy(), t.untyped_storage(), t.resize_(3), t.apply_(abs)
    expected = [torch.Tensor.numpy, torch.Tensor.untyped_storage, torch.Tensor.resize_]
    assert Seen.functions == [data, *expected, torch.Tensor.apply_]
    assert pickle.loads(pickle.dumps(setter)) is setter is torch._C._set_mkldnn_enabled
    try:
        del torch.rand(1).data
    except RuntimeError as error:
        assert "Deleting tensor data" in str(error)
    else:
        raise AssertionError
"""
    fork_server.run(["-c", program], check=True)


def test_each_listed_function_is_watched():
    global_state_guard.install()
    found = [
        (owner, name) for owner, name, _ in global_state_guard.watched() if hasattr(owner, name)
    ]
    assert len(found) > 40
    for owner, name in found:
        assert ebb._C.watch(getattr(owner, name), ebb._C.Watch.WAITS), name

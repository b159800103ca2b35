"""What compiled graphs save under the policies of their regions, and what ebb says of it."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._inductor.utils import fresh_inductor_cache

import ebb
from ebb._region import in_graph, tracing
from ebb_tests.programs.compiled import Wide, WritesInside

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
R = ebb.Rule


def compiled(policy, **options):
    """A program compiled from scratch, and the result of its first call."""
    torch._dynamo.reset()
    program = Wide()
    if policy is not None:
        ebb.apply(program, policy, "")
    call = torch.compile(program, fullgraph=True, **({"backend": "aot_eager"} | options))
    return program, call(torch.randn(4, 8))


def saved_bytes(policy, **options):
    """Bytes that the compiled graph saves for backward, without parameters."""
    program, y = compiled(policy, **options)
    own = {p.untyped_storage().data_ptr() for p in program.parameters()}
    storages = {t.untyped_storage().data_ptr(): t for t in y.grad_fn.saved_tensors}
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)


@pytest.fixture
def fresh_cache():
    """Empty caches of compiled code."""
    with fresh_inductor_cache():
        yield


X, H = 4 * 8 * 4, 4 * 256 * 4  # bytes of a narrow and of a wide activation


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("policy", "bytes_"),
    [
        (None, 4 * H + 3 * X),
        (ebb.policies.recompute_all, X),
        (ebb.Policy({"aten::addmm": ebb.SAVE}), 2 * H + 2 * X),
        (ebb.Policy([R("aten::addmm", ebb.SAVE, nth=1)]), H + X),
        (ebb.Policy([R("aten::addmm", ebb.SAVE, every=2)]), 2 * X),
        (ebb.Policy([R("aten::addmm", ebb.SAVE, min_bytes=H)]), 2 * H + X),
        (ebb.Policy([R("aten::addmm", ebb.SAVE, max_bytes=X)]), 2 * X),
        (ebb.Policy([R("*", ebb.SAVE, dtype="float64")]), X),
        (ebb.Policy([R("*", ebb.SAVE, module="up")]), 2 * H + X),
        (ebb.Policy([R("*", ebb.SAVE, module="up", nth=1, per_module=True)]), X),
        (ebb.Policy([R("*", ebb.SAVE, module="down")]), 2 * X),
    ],
)
def test_a_graph_saves_what_the_policy_says(policy, bytes_, dynamic):
    assert saved_bytes(policy, dynamic=dynamic) == bytes_


def test_what_a_graph_cannot_do_is_said_once():
    in_graph._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="OFFLOAD and PAGE mean SAVE"):
        offloaded = saved_bytes(ebb.Policy({"aten::addmm": ebb.OFFLOAD}))
    assert offloaded == 2 * H + 2 * X
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ebb:")
        saved_bytes(ebb.Policy([R("aten::addmm", ebb.SAVE, name="h")]))


def test_the_users_pass_on_the_joint_graph_still_runs():
    seen = []

    def own(graph, inputs):
        seen.append([n.meta.get("recompute") for n in graph.graph.nodes])
        return graph

    config.joint_custom_pass = own
    assert saved_bytes(ebb.policies.recompute_all) == X
    assert len(seen) == 1
    assert set(seen[0]) == {None}


def settings():
    return config.joint_custom_pass, config.enable_autograd_cache


def test_torchs_settings_change_only_while_a_graph_with_a_region_is_compiled():
    config.enable_autograd_cache = True
    before, during = settings(), []

    def own(graph, inputs):
        during.append(settings())
        return aot_eager(graph, inputs)

    assert saved_bytes(ebb.policies.recompute_all, backend=own) == X
    assert [cached for _, cached in during] == [False]
    assert settings() == before


def test_torchs_settings_return_after_a_compilation_that_fails():
    config.enable_autograd_cache = True
    before = settings()

    def fails(graph, inputs):
        raise ValueError("no code for this graph")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no code for this graph"):
        saved_bytes(ebb.policies.recompute_all, backend=fails)
    assert settings() == before


COMPILES_A_BACKWARD_IN_A_FRAME = """
import torch, ebb

def loss(x):
    with ebb.region(ebb.policies.recompute_all):
        return (x.sin() * x).exp().sum()

def gradient(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x.sin() * x).sum(), x)[0]

x = torch.randn(4, requires_grad=True)
torch.compile(loss, backend="aot_eager")(x).backward()
assert torch.equal(torch.compile(gradient, backend="aot_eager")(x), gradient(x))
"""


def test_a_backward_may_be_compiled_inside_a_frame_that_is_compiled():
    """Dynamo holds a lock while it calls ebb at the end of a compilation."""
    command = [sys.executable, "-c", COMPILES_A_BACKWARD_IN_A_FRAME]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.sweep
def test_the_cache_of_graphs_works_for_graphs_without_regions(fresh_cache):
    """The cache's key does not contain the policy."""
    config.enable_autograd_cache = True
    hits = []
    for policy in (None, ebb.policies.recompute_all, None, ebb.policies.recompute_all):
        counters.clear()
        _, y = compiled(policy, backend="inductor")
        y.sum().backward()  # the cache gets the graph when its backward is compiled
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1, 0]


@pytest.mark.parametrize("lost", ["the output's", "the inputs'"])
def test_regions_do_nothing_if_written_inputs_are_unknown(lost, caplog, monkeypatch):
    tag = in_graph._tag

    def forgets(graph):
        for node in graph.graph.nodes:
            if node.op == {"the output's": "output", "the inputs'": "placeholder"}[lost]:
                node.meta.pop("desc", None)
        tag(graph)
        assert all("recompute" not in node.meta for node in graph.graph.nodes)

    monkeypatch.setattr(in_graph, "_tag", forgets)
    with caplog.at_level(logging.WARNING, "ebb"):
        program = WritesInside()
        ebb.apply(program, ebb.policies.recompute_all, "")
        # This backend's graph returns the new contents of inputs; aot_eager's writes in place.
        compiled = torch.compile(program, backend="aot_eager_decomp_partition")
        compiled(torch.randn(4, 8))
    assert "written inputs are unknown: regions do nothing" in caplog.text


def test_another_policy_is_another_graph():
    program = Wide()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    found = []
    for policy in (ebb.policies.recompute_all, ebb.policies.save_all, None):
        handle = ebb.apply(program, policy, "") if policy else None
        y = compiled(torch.randn(4, 8))
        found.append(len(y.grad_fn.saved_tensors))
        if handle:
            handle.remove()
    assert found[0] < found[1] == found[2]


def test_an_exported_program_has_no_regions():
    program = Wide()
    ebb.apply(program, ebb.policies.recompute_all, "")
    tracing.region_is_traced.cache_clear()
    with pytest.warns(UserWarning, match="regions have no effect under torch.export"):
        exported = torch.export.export(program, (torch.randn(4, 8),), strict=True)
    notes = [node.meta.get("custom") or {} for node in exported.graph.nodes]
    assert not any(note.get(in_graph.REGION) for note in notes)


def test_the_log_counts_operators(caplog):
    with caplog.at_level(logging.INFO, "ebb"):
        saved_bytes(ebb.policies.save_matmuls)
    assert "region Wide in a compiled graph: 4 operators saved, " in caplog.text


def test_a_policy_as_an_argument_of_the_compiled_function():
    linear = nn.Linear(8, 8)

    def function(x, policy):
        with ebb.region(policy):
            return linear(x.sin()).exp().sin()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8)
    counts = []
    for name in ("recompute_all", "save_all", "save_matmuls", "recompute_all"):
        counts.append(len(compiled(x, getattr(ebb.policies, name)).grad_fn.saved_tensors))
    assert counts[0] == counts[3] != counts[1]


@pytest.mark.parametrize("wrong", [{"escapes": "bogus"}, {"name": 3}, {"root": 3}, {"nonsense": 1}])
def test_wrong_arguments_of_a_region_in_a_graph(wrong):
    def function(x):
        with ebb.region(**wrong):
            return x.sin()

    with pytest.raises((TypeError, ValueError, torch._dynamo.exc.Unsupported)):
        torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(1))

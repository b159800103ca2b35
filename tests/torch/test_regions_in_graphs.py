"""Regions inside compiled functions. See Note [Regions in compiled graphs].

`aot_eager` runs the operators of the compiled graph one by one, so gradients have eager's bits.
"""

from __future__ import annotations

import logging
import warnings
from operator import attrgetter

import pytest
import torch
from exactness import same_bits
from torch import nn
from torch._functorch import config
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import ebb
from ebb._region import in_graph, tracing

R = ebb.Rule


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    before = config.joint_custom_pass, config.enable_autograd_cache
    yield
    config.joint_custom_pass, config.enable_autograd_cache = before
    torch._dynamo.reset()


class Program(nn.Module):
    """Two functions, `first` and `second`, that `forward` calls in regions; `outside` runs between.

    Each subclass overrides the functions that it tests.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.ones(8))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x + self.mean).sin()).exp()

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp()

    def after(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(self.before(x)).sin())
        self.after()
        return y


class WritesInside(Program):
    def first(self, x):
        y = super().first(x)
        self.mean.mul_(0.9)
        return y


class WritesBefore(Program):
    def before(self, x):
        self.mean.mul_(0.9)
        return x


class WritesWhatWasRead(Program):
    def before(self, x):
        y = x + self.mean * 1.5
        self.mean.mul_(0.9)
        return y


class WritesAfter(Program):
    def after(self):
        self.mean.mul_(0.9)


class WritesAfterAView(WritesAfter):
    def first(self, x):
        return self.linear((x + self.mean.view(2, 4).view(8)).sin()).exp()


class WritesAParameter(Program):
    def first(self, x):
        return self.linear((x + self.other.bias).sin()).exp()

    def after(self):
        self.other.bias.data.add_(1)


class WritesBetweenReads(Program):
    def first(self, x):
        y = x + self.mean
        self.mean.add_(1)
        return self.linear(y.sin()).exp()


class WritesAResult(Program):
    def first(self, x):
        y = (x + self.mean).sin()
        self.mean.add_(y.detach().mean(0))
        return self.linear(y.exp()).exp()


class Copies(Program):
    def first(self, x):
        self.mean.copy_(self.linear(x).detach().mean(0))
        return self.linear(x * self.mean).exp()


class BatchNorm(Program):
    def first(self, x):
        return self.norm(self.linear(x.sin())).exp()


class Attention(Program):
    def first(self, x):
        q, v = x.view(1, 4, 2, 4), self.linear(x).view(1, 4, 2, 4)
        return F.scaled_dot_product_attention(q, q.sin(), v).reshape(4, 8).exp()


class SeveralResults(Program):
    def first(self, x):
        largest, places = self.linear(x).topk(4)
        a, b = self.linear(x).sin().chunk(2, 1)
        y = torch.zeros_like(x).scatter(1, places, largest.exp())
        return y.sin() + torch.cat([a * b.exp(), a], 1)


class WritesInPlace(Program):
    def first(self, x):
        return self.linear(x).sin().mul_(2).add_(x).exp()


class Dropout(Program):
    def first(self, x):
        return F.dropout(self.linear(x).exp(), 0.3)


class RandomNumbers(Program):
    def first(self, x):
        y = self.linear(x * torch.bernoulli(torch.full_like(x, 0.5))).exp()
        y = y * torch.randn_like(y) + F.rrelu(self.linear(y), training=True).sin()
        return y[torch.multinomial(torch.ones(4), 4)].exp()


class Norms(Program):
    def first(self, x):
        return F.layer_norm(self.linear(x), (8,)).sin()


class Detaches(Program):
    def first(self, x):
        y = self.linear(x).sin()
        with torch.no_grad():
            z = y.sin() * 2
        return (y * y.detach().exp() * z).exp()


class Autocast(Program):
    def first(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x).sin().float().exp()


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class Contexts(Program):
    def first(self, x):
        return KeepsOnContext.apply(x.sin(), self.linear.weight).exp()


class DrawsForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.rand_like(x))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class WritesStatisticsThatAreRead(Program):
    def first(self, x):
        y = self.norm(self.linear(x.sin()))
        return (y * self.norm.running_mean.exp()).exp()


class WritesACopiedBuffer(Program):
    """Inductor removes the copies of the buffer, and their tags."""

    def first(self, x):
        copied = F.dropout(torch.cat([self.mean.clone()]).repeat(1), 0.0).double().float()
        return self.linear(x + copied).exp()

    def after(self):
        self.mean.mul_(0.5)


class WritesItsInput(Program):
    def first(self, x):
        y = x * 1.0
        self.other.weight.data.lerp_(self.linear.weight.data, 0.1)
        return self.other(self.linear(y.mul_(2).sin())).exp()


class Wide(Program):
    """Each region has two matrix products, with a result of 256 columns between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 256), nn.Linear(256, 8)

    def first(self, x):
        return x + self.down(self.up(x).sin().exp())

    def second(self, x):
        return x + self.down(self.up(x).cos().exp())


PROGRAMS = [*Program.__subclasses__(), WritesAfterAView, Program]


def by_apply(program, policy):
    ebb.apply(program, policy, "")


def by_decorator(program, policy):
    first, second = program.first, program.second
    program.first = ebb.region(policy, "first")(first)
    program.second = lambda x: ebb.region(policy)(second)(x)


def by_with(program, policy):
    first, second = program.first, program.second

    def in_region(x):
        with ebb.region(policy):
            return first(x)

    def returns(x):
        with ebb.region(policy, "second") as region:
            y = second(x)
            region.returns(y)
        return y

    program.first, program.second = in_region, returns


def by_checkpoint(program, policy):
    first, second = program.first, program.second
    program.first = lambda x: ebb.checkpoint(first, x, policy=policy, use_reentrant=False)
    program.second = lambda x: ebb.checkpoint(second, x, policy=policy)


def nested(program, policy):
    first = program.first

    def inside(x):
        with ebb.region(ebb.policies.save_all):
            x = x * 1.0
            with ebb.region(policy):
                x = first(x)
            return x * 1.0

    program.first = inside


def beside_torchs(program, policy):
    second = program.second
    by_with(program, policy)
    program.second = lambda x: torch.utils.checkpoint.checkpoint(second, x, use_reentrant=False)


FORMS = (by_apply, by_decorator, by_with, by_checkpoint, nested, beside_torchs)
POLICIES = ("recompute_all", "save_matmuls")


def steps(program, call):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        y = call(x)
        y.sum().backward()
        found += [y.detach(), x.grad]
        found += [p.grad.clone() for p in program.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in program.buffers()]
        program.zero_grad()
    return found


def check(kind, form, policy, **options):
    eager, program = kind(), kind()
    expected = steps(eager, eager)
    form(program, getattr(ebb.policies, policy))
    found = steps(program, torch.compile(program, **({"backend": "aot_eager"} | options)))
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize(
    ("kind", "form", "policy"),
    [
        pytest.param(kind, FORMS[(i + j) % len(FORMS)], POLICIES[j], id=f"{kind.__name__}-{j}")
        for i, kind in enumerate(PROGRAMS)
        for j in range(2)
    ],
)
def test_gradients_are_those_of_eager(kind, form, policy):
    check(kind, form, policy, fullgraph=True)
    assert ebb.stats()["total"]["entered"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_gradients_are_those_of_eager_in_all_forms(kind, form):
    for policy, dynamic in zip(POLICIES, (None, True), strict=True):
        torch._dynamo.reset()
        check(kind, form, policy, dynamic=dynamic)


def saved_bytes(policy, **options):
    """Bytes that the compiled graph saves for backward, without parameters."""
    torch._dynamo.reset()
    program = Wide()
    if policy is not None:
        ebb.apply(program, policy, "")
    y = torch.compile(program, fullgraph=True, **({"backend": "aot_eager"} | options))(
        torch.randn(4, 8)
    )
    own = {p.untyped_storage().data_ptr() for p in program.parameters()}
    storages = {t.untyped_storage().data_ptr(): t for t in y.grad_fn.saved_tensors}
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)


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


@pytest.mark.sweep
def test_caches_that_do_not_know_the_policy_are_off():
    config.enable_autograd_cache = True
    found = [saved_bytes(p, backend="inductor") for p in (None, ebb.policies.recompute_all)]
    assert not config.enable_autograd_cache
    assert found[1] == X < found[0]


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


class Breaks(Wide):
    def first(self, x):
        y = self.up(x).sin()
        torch._dynamo.graph_break()
        return x + self.down(y.exp())


@pytest.mark.parametrize("form", [by_apply, by_with, by_checkpoint])
def test_a_region_with_a_graph_break_surrounds_compiled_parts(form):
    check(Breaks, form, "recompute_all")


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
    tracing._warn.cache_clear()
    with pytest.warns(UserWarning, match="regions have no effect under torch.export"):
        exported = torch.export.export(program, (torch.randn(4, 8),), strict=True)
    notes = [node.meta.get("custom") or {} for node in exported.graph.nodes]
    assert not any(note.get(in_graph.REGION) for note in notes)


def test_the_log_counts_operators(caplog):
    with caplog.at_level(logging.INFO, "ebb"):
        saved_bytes(ebb.policies.save_matmuls)
    assert "region Wide in a compiled graph: 4 operators saved, " in caplog.text


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (Program, "reduce-overhead"),
        *((kind, None) for kind in (Dropout, RandomNumbers, BatchNorm, Attention)),
    ],
)
def test_inductor_gives_the_gradients_that_it_gives_without_ebb(kind, mode):
    plain, program = kind(), kind()
    expected = steps(plain, torch.compile(plain, mode=mode, fullgraph=True))
    by_apply(program, ebb.policies.recompute_all)
    found = steps(program, torch.compile(program, mode=mode, fullgraph=True))
    assert all(map(same_bits, found, expected))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [k for k in PROGRAMS if k.__name__.startswith("Writes")])
def test_inductor_recomputes_from_no_input_that_the_graph_writes(kind):
    """Without ebb, Inductor recomputes from written inputs, and gives wrong gradients."""
    eager, program = kind(), kind()
    by_apply(program, ebb.policies.recompute_all)
    found = steps(program, torch.compile(program, fullgraph=True))
    for a, b in zip(found, steps(eager, eager), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # Inductor rounds differently


@pytest.mark.parametrize("written", ["mean", "linear.bias", "x"])
def test_a_write_after_the_graph_is_an_error_if_backward_recomputes_from_it(written):
    program = Program()
    ebb.apply(program, ebb.policies.recompute_all, "")
    x = torch.randn(4, 8)
    y = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    with torch.no_grad():
        (x if written == "x" else attrgetter(written)(program)).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_two_forwards_before_a_backward():
    plain, program = WritesInside(), WritesInside()
    by_apply(program, ebb.policies.recompute_all)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for model, call in ((plain, plain), (program, compiled)):
        x = torch.linspace(0, 1, 32).view(4, 8)
        results = [call(x), call(x * 2)]
        sum(results).sum().backward()
        model.found = model.linear.weight.grad
    assert same_bits(program.found, plain.found)


def test_random_numbers_that_only_backward_needs_are_drawn_in_forward():
    class Draws(Program):
        def first(self, x):
            return self.linear(DrawsForBackward.apply(x.sin())) * torch.rand_like(x)

    check(Draws, by_apply, "recompute_all", backend="aot_eager_default_partitioner")


def test_a_write_to_an_input_that_a_function_keeps_on_its_context():
    """Autograd does not check the version of such an input, so ebb saves what depends on it."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return KeepsOnContext.apply(x, self.weight).sin()

    found = []
    for policy in (None, ebb.policies.recompute_all):
        torch._dynamo.reset()
        program = Keeps()
        if policy:
            ebb.apply(program, policy, "")
        x = torch.ones(4, 8)
        y = torch.compile(program, backend="aot_eager_default_partitioner", fullgraph=True)(x)
        x.add_(1)
        y.sum().backward()
        found.append(program.weight.grad)
    assert same_bits(*found)


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_written_buffer_of_a_subclass(backend):
    class Buffers(Program):
        def __init__(self):
            super().__init__()
            self.two = TwoTensor(torch.ones(8), torch.ones(8))

        def first(self, x):
            return self.linear((x + self.two.clone().a).sin()).exp()

        def after(self):
            self.two.mul_(0.5)

    eager, program = Buffers(), Buffers()
    by_apply(program, ebb.policies.recompute_all)
    found = steps(program, torch.compile(program, backend=backend))
    for a, b in zip(found, steps(eager, eager), strict=True):
        torch.testing.assert_close(a, b)


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

"""Advice of reports: rules that are applied here, and cost the bytes that the report says."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401

LAYERS = 3


class PreLN(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.1, bias: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4))
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(self.act(self.up(self.norms[1](x)))))


class Gated(nn.Module):
    """Writes in place, and reads one value several times."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        gated = nn.functional.silu(self.gate(y), inplace=False) * self.up(y).sigmoid_()
        return x + self.down(nn.functional.relu_(gated.sin()))


def _with(rule: ebb.Rule, policy: ebb.Policy) -> ebb.Policy:
    return ebb.Policy([rule, *policy.rules], policy.default, policy.inputs)


def _reported(model, policy):
    """The report of the second step, and its gradients."""
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        with ebb.record_reports(), ebb.apply(model, policy, "layers.*"):
            x = model.layers[0](torch.randn(2, 8, 32))
            for layer in model.layers[1:]:
                x = layer(x)
            x.square().mean().backward()
    return ebb.report(), [p.grad.clone() for p in model.parameters()]


def _model(block, **settings):
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(block(**settings) for _ in range(LAYERS))
    return model


POLICIES = {
    "recompute_all": ebb.policies.recompute_all,
    "save_matmuls": ebb.policies.save_matmuls,
    "torchtitan": ebb.policies.torchtitan,
    "each_time": ebb.Policy({"aten::gelu": ebb.RECOMPUTE_EACH_TIME}),
    "every": ebb.Policy(
        [ebb.Rule("aten::mm", ebb.SAVE, every=2), ebb.Rule("aten::addmm", ebb.SAVE, every=2)]
    ),
}
MODELS = {
    "pre_ln": lambda: _model(PreLN),
    "no_dropout": lambda: _model(PreLN, dropout=0.0, bias=False),
    "gated": lambda: _model(Gated),
}


# presets have rules for operators that torch takes apart
@pytest.mark.filterwarnings("ignore:ebb. the rule")
@pytest.mark.parametrize(
    ("model", "policy"), [pair for pair in product(MODELS, POLICIES) if pair != ("gated", "every")]
)
def test_advised_rule_costs_the_bytes_that_the_report_says(model, policy):
    net, name, policy = MODELS[model](), policy, POLICIES[policy]
    report, expected = _reported(net, policy)
    before = sum(row.replays for row in report.rows)

    assert len(report.advice) >= 2
    if name == "every":  # with one rule more the second call would be another one
        assert not any("mm" in advice.op for advice in report.advice)
    for advice in report.advice:
        more, gradients = _reported(net, _with(eval(advice.rule, {"ebb": ebb}), policy))

        assert all(map(same_bits, gradients, expected))
        assert more.held - report.held == advice.bytes, advice
        assert sum(row.replays for row in more.rows) < before, advice
        assert advice.layers == LAYERS * (2 if "norms" in advice.where else 1), advice


def test_advice_is_sorted_and_names_the_line():
    report, _ = _reported(MODELS["pre_ln"](), ebb.policies.recompute_all)

    seconds = [one.seconds for one in report.advice]
    assert seconds == sorted(seconds, reverse=True)
    (gelu,) = [one for one in report.advice if one.op == "aten::gelu.default"]
    assert gelu.rule == "ebb.Rule('aten::gelu.default', ebb.SAVE, module='layers.*.act')"
    assert gelu.where == f"layers.0-{LAYERS - 1}.act"
    line = PreLN.forward.__code__.co_firstlineno + 5
    assert gelu.source == f"{__file__}:{line}"


class Slow(torch.autograd.Function):
    """Takes much longer to compute than to save."""

    @staticmethod
    def forward(ctx, x):
        return torch.ops.ebb_advice.slow(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.fixture(scope="module")
def slow_operator():
    def slow(x):
        time.sleep(0.02)
        return x * 2

    with torch.library._scoped_library("ebb_advice", "DEF") as library:
        library.define("slow(Tensor x) -> Tensor")
        library.impl("slow", slow, "CompositeExplicitAutograd")
        yield


@pytest.mark.usefixtures("slow_operator")
def test_advised_rule_saves_the_time_of_replays():
    """The sleep of one operator, of which four run: the rest of a replay takes microseconds."""
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    x = torch.randn(4, 8)
    policy = ebb.Policy([ebb.Rule("ebb_advice::slow", ebb.RECOMPUTE)])
    with ebb.record_reports():
        loss = 0
        for weight in weights:
            with ebb.region(policy):
                loss = loss + (Slow.apply(x @ weight) @ weight).sum()
        loss.backward()

    best = ebb.report().advice[0]

    assert (best.op, best.bytes) == ("ebb_advice::slow.default", 4 * 128)
    assert 4 * 0.02 <= best.seconds < 8 * 0.02


def test_replays_ahead_of_backward_are_no_reason_for_advice():
    replay = ebb._report.advice.Replays
    row = _reported(MODELS["pre_ln"](), ebb.policies.recompute_all)[0].rows[0]
    made = replace(
        row, op="aten::sin.default", fate="recomputed", rule="default", reason="", replays=1
    )
    assert replay([made], [(0, 64, True)], [([], [0], 0.0)]).advice() == ()
    (advice,) = replay([made], [(0, 64, True)], [([], [0], 0.5)]).advice()
    assert (advice.seconds, advice.bytes) == (0.5, 64)


def test_no_advice_if_everything_is_saved():
    report, _ = _reported(MODELS["pre_ln"](), ebb.policies.save_all)

    assert report.advice == ()
    assert "would save about" not in str(report)


def test_text_and_json_have_the_advice():
    report, _ = _reported(MODELS["pre_ln"](), ebb.policies.recompute_all)

    assert report.to_dict()["advice"][0]["rule"] == report.advice[0].rule
    lines = str(report).splitlines()
    place = lines.index(
        "each of these rules, added as the first rule, would save about this much time in each "
        "forward and backward:"
    )
    assert report.advice[0].rule in lines[place + 1]
    assert ebb._report.text.size(report.advice[0].bytes) in lines[place + 1]

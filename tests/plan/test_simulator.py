"""Predicted bytes of a step are those that the step allocates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb._plan.measure import measure
from ebb._plan.plan import plan_of
from ebb._plan.simulate.changes import Changes, highest, union
from ebb._plan.simulate.choice import EAGER, Choice
from ebb._plan.simulate.simulator import Simulator
from ebb._report.text import price
from ebb_tests.predictions import CLOSE, assert_close, assert_predicted, every_program
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import WIDTH, planning


def operators_of(found, region):
    return len(found.simulator.step.calls[found.chooser.calls[region][0]].operators)


def all_saved(found):
    regions = found.chooser.calls
    return [{region: Choice(frozenset(range(operators_of(found, region)))) for region in regions}]


def one_saved(found):
    """Each operator alone, in one region."""
    region = next(iter(found.chooser.calls))
    count = operators_of(found, region)
    others = dict.fromkeys(found.chooser.calls, Choice())
    for place in range(0, count, max(1, count // 8)):
        yield others | {region: Choice(frozenset([place]))}


CHOICES = {
    "eager": lambda found: [dict.fromkeys(found.chooser.calls, EAGER)],
    "all saved": all_saved,
    "all recomputed": lambda found: [dict.fromkeys(found.chooser.calls, Choice())],
    "one saved": one_saved,
    "random": lambda found: map(found.random_sets, range(6)),
}


@every_program
@pytest.mark.parametrize("choices", CHOICES)
def test_peak_and_replays_of_choices_are_predicted(make, choices):
    found = planning(make)
    for choice in CHOICES[choices](found):
        assert_predicted(make, found, found.chosen(choice))


@every_program
@pytest.mark.parametrize("share", [0.5, 0.65, 0.8, 0.95])
def test_peak_and_replays_of_plans_are_predicted(make, share):
    found = planning(make)
    chooser = found.chooser

    assert_predicted(make, found, chooser.choose(int(share * found.plain_peak)) or chooser.least())


class Inverted(nn.Module):
    """Of a MobileNet: activations in place of which autograd saves a copy of the input."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * channels, channels, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(4 * channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(self.norm1(self.conv1(x)), inplace=True)
        return F.relu6(self.norm2(self.conv2(y)), inplace=True)


def inverted() -> programs.Program:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *[Inverted() for _ in range(3)])
    return programs.Program(model, programs.of_pictures(model, 3), ("[123]",))


def test_clone_that_autograd_saves_before_a_write():
    """`hardswish_` saves a clone of what it writes over. If the clone is kept, or if `hardswish_`
    runs each time, a replay of it copies its input only where something else needs that."""
    found = planning(inverted)
    step = found.simulator.step
    operators = range(len(step.calls[0].operators))
    written_over = {n for n in operators if step.overwriter_of(n) is not None}
    choices = [
        *(Choice(frozenset([place])) for place in operators if place not in written_over),
        *(Choice(each_time=frozenset([place])) for place in operators),
        *(Choice(each_time=frozenset(range(place))) for place in operators),
        *(Choice(each_time=frozenset(range(place, len(operators)))) for place in operators),
    ]

    found.peak(found.chooser.recomputed())  # a kernel's first call takes other scratch memory
    for choice in choices:
        chosen = found.chosen(dict.fromkeys(found.chooser.calls, choice))
        assert_close(found.chooser.estimate(chosen).peak, found.peak(chosen))


@pytest.mark.parametrize("share", [0.5, 1, 10])
def test_plan_names_its_time_if_the_machine_was_slower_in_the_profile(share):
    measured = planning(programs.pre_ln).measured
    measured = replace(measured, duration=share * Simulator(measured).step.replaying)

    plain = Simulator(measured).plain.duration
    plan = plan_of(measured, 0.5)

    assert 0 < plain < measured.duration
    assert price(plan.duration / plain) in plan.summary()


def test_times_of_regions_add_up():
    found = planning(programs.llama)
    simulator = found.simulator
    plain = simulator.plain.duration
    saved = [Choice(frozenset([3, 7])), None, Choice()]

    total = simulator.estimate(saved).duration

    parts = [simulator.of_call(call, kept).added for call, kept in enumerate(saved)]
    assert total == pytest.approx(plain + sum(parts))
    assert parts[1] == 0


def test_replays_ahead_are_hidden():
    found = planning(programs.pre_ln)
    simulator = Simulator(found.measured, ahead=True)
    nothing = [Choice()] * len(simulator.step.calls)

    ahead, alone = simulator.estimate(nothing), found.simulator.estimate(nothing)

    assert simulator.plain.duration <= ahead.duration < alone.duration


def test_with_replays_ahead_the_last_region_is_the_last_that_is_not_eager():
    """What autograd saves of it is there when backward begins."""
    step = planning(programs.pre_ln)
    simulator = Simulator(step.measured, ahead=True)
    calls = len(simulator.step.calls)
    all_but_last = [*[Choice()] * (calls - 1), None]

    found = simulator.estimate(all_but_last)

    all_kept = Choice(frozenset(range(len(simulator.step.calls[-2].operators))))
    alone = simulator.estimate([*[Choice()] * (calls - 2), all_kept, None])
    assert (found.peak, found.replays) == (alone.peak, alone.replays)


@pytest.mark.parametrize("count", range(1, 5))
def test_union_of_intervals_covers_the_same_times(count):
    edges = [(0.0, 1.0), (1.0, 2.0), (3.0, 5.0), (4.0, 4.5)]

    for chosen in itertools.permutations(edges, count):
        joined = union(chosen)

        assert joined == sorted(joined)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(joined))
        for time in (0.5, 1.0, 1.5, 2.5, 3.5, 4.25, 4.75):
            there = any(begin <= time < end for begin, end in chosen)
            assert there == any(begin <= time < end for begin, end in joined)


def test_frees_come_before_allocations_of_the_same_time():
    assert highest([Changes([(1.0, 5), (2.0, -5)]), Changes([(2.0, 4), (3.0, -4)])]) == (5, 1.0)
    assert highest([Changes([])]) == (0, 0.0)
    assert Changes([(1.0, 5), (2.0, -5)]).at(1.5) == 5


class Gated(nn.Module):
    """A GRUCell in a loop: it writes to chunks of one storage, each with its version counter."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.GRUCell(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        state, found = torch.zeros(x.shape[1], 32), []
        for one in x:
            state = self.cell(one, state)
            found.append(self.norm(state))
        return torch.stack(found)


def test_recurrent_cell_in_a_loop():
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    x = torch.randn(24, 64, 32)

    def step():
        model(x).square().mean().backward()

    step()
    measured = measure(step, model, ["0", "1"])
    simulator = Simulator(measured)

    predicted = simulator.estimate([Choice(), Choice()]).peak

    assert measured.profile.peak <= predicted <= (1 + CLOSE) * measured.profile.peak


class Ends(nn.Module):
    """A block whose last operator saves its input and small results."""

    def __init__(self, last) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(x).exp())


LAST = {
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "pool": lambda x: F.max_pool1d(x, 2).repeat(1, 1, 2),
    "maximum": lambda x: x - x.amax(-1, keepdim=True),
    "swish": lambda x: x * x.sigmoid(),
    "scaled swish": lambda x: x * (x * torch.ones(WIDTH).cos()).sigmoid(),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("kept", [None, "aten::exp", "aten::addmm"])
def test_last_operator_that_saves_its_input_and_small_results(last, kept):
    torch.manual_seed(0)
    model = nn.Sequential(Ends(LAST[last]), Ends(LAST[last]))
    x = torch.randn(64, 16, WIDTH)
    program = programs.Program(model, lambda: model(0.1 * x).square().sum().backward(), ("[01]",))
    found = planning(lambda: program)
    operators = found.simulator.step.operators
    calls = [found.simulator.step.calls[numbers[0]] for numbers in found.chooser.calls.values()]
    names = [operators[op].func_name for op in calls[0].operators]
    chosen = frozenset(place for place, name in enumerate(names) if kept and kept in name)
    assert bool(chosen) == bool(kept), names

    choices = found.chosen(dict.fromkeys(found.chooser.calls, Choice(chosen)))

    assert found.chooser.estimate(choices).peak == found.peak(choices)


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        x += self.down(self.up(x.relu()).relu_())
        return x


class Noisy(nn.Module):
    """torch.rand has no tensor as an argument: ebb sees its result as an input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        h = self.up(x)
        h = h * torch.rand(h.shape) + torch.randn(h.shape) * 0.1
        return x + self.down(h.relu())


@pytest.mark.parametrize(
    ("block", "too_high"), [(WritesItsInput, CLOSE), (Noisy, 0.08)], ids=["in place", "factories"]
)
@pytest.mark.parametrize("share", [1.0, 0.9, 0.8, 0.6, 0.4])
def test_blocks_that_write_to_inputs_or_call_factories(block, too_high, share):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(block() for _ in range(6)))
    x = torch.randn(64, 32)

    def step():
        model(x).square().mean().backward()

    step()
    measured = measure(step, model, [f"{n}" for n in range(1, 7)])
    plain = ebb.profile(step, steps=1).peak
    plan = plan_of(measured, share, at_least=True)
    with plan.apply(model):
        step()
        found = ebb.profile(step, steps=1).peak

    assert plain <= plan.plain_peak <= (1 + too_high) * plain
    assert found <= plan.peak <= (1 + too_high) * found

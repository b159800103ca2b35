"""Profiles whose host does not wait: times of the device in place of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebb._plan.profile.device_times import on_device
from ebb._plan.simulate.simulator import Simulator
from ebb._plan.simulate.step import Step
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planning

PROGRAMS = (programs.pre_ln, programs.unet, programs.accumulation, programs.chain)
SLOWER = 20  # times that kernels take longer on the pretended device


def not_waiting(profile):
    """As if the host had only launched what ran, and had waited at the end."""
    return replace(
        profile,
        duration=SLOWER * profile.duration,
        operators=tuple(replace(one, runtime=SLOWER * one.runtime) for one in profile.operators),
    )


@pytest.mark.parametrize("make", PROGRAMS)
def test_kernels_have_their_time(make):
    of_host = not_waiting(planning(make).measured.profile)

    found = on_device(of_host)

    assert found.duration >= of_host.duration
    step = Step(found)
    for number, one in enumerate(found.operators):
        assert step.end_of(number) - one.start == pytest.approx(one.runtime, rel=1e-6)
    kernels = sum(one.runtime for one in found.operators)
    assert step.forward_ends >= 0.99 * kernels / (2 if make is programs.accumulation else 1)


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_all_that_happened_stays(make, seed):
    """So bytes are predicted as before."""
    planned = planning(make)
    measured = planned.measured
    device = replace(measured, profile=not_waiting(measured.profile), on_accelerator=True)
    there, here = Simulator(device), planned.simulator
    choices = planned.chooser.of_calls(planned.chosen(planned.random_sets(seed)))

    assert there.plain.peak == here.plain.peak
    assert there.estimate(choices).peak == here.estimate(choices).peak
    assert there.estimate(choices).replays == here.estimate(choices).replays


def test_what_never_was_stays_so():
    profile = planning(programs.pre_ln).measured.profile
    for one, other in zip(profile.values, on_device(profile).values, strict=True):
        for name in ("let_go", "asked", "again", "ended"):
            assert (getattr(one, name) < 0) == (getattr(other, name) < 0)


@pytest.mark.parametrize("make", PROGRAMS)
def test_replays_of_small_kernels_take_the_time_of_the_host(make):
    """Where the host is the slower one, a replay adds the time in which the host launches it."""
    measured = planning(make).measured
    of_host = {name: runtime for name, _, runtime in measured.profile.replays}
    kernels = tuple(
        replace(one, runtime=of_host.get(one.func_name, one.runtime) / SLOWER)
        for one in measured.profile.operators
    )
    profile = replace(measured.profile, operators=kernels)
    device = Simulator(replace(measured, profile=profile, on_accelerator=True))

    replaying = Step(on_device(profile)).replaying
    assert replaying >= 0.99 * sum(runtime for *_, runtime in profile.replays)
    assert device.replay_time(0) > kernels[0].runtime


def test_copies_have_the_device_s_time_to_hide():
    """The host is done with a block's forward in a twentieth of it."""
    profile = not_waiting(planning(programs.pre_ln).measured.profile)
    host, device = Step(profile), Step(on_device(profile))

    for one, other in zip(host.calls, device.calls, strict=True):
        hidden = device.working(other.begins, other.ends)
        assert hidden > 5 * host.working(one.begins, one.ends)

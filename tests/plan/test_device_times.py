"""Device times of profiles whose host does not wait for the device."""

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
    """As if the host had only launched the kernels, and had waited at the end."""
    return replace(
        profile,
        duration=SLOWER * profile.duration,
        operators=tuple(replace(one, runtime=SLOWER * one.runtime) for one in profile.operators),
    )


@pytest.mark.parametrize("make", PROGRAMS)
def test_operators_take_the_time_of_their_kernels(make):
    of_host = not_waiting(planning(make).measured.profile)

    found = on_device(of_host)

    assert found.duration >= of_host.duration
    step = Step(found)
    for number, one in enumerate(found.operators):
        assert step.end_of(number) - one.start == pytest.approx(one.runtime, rel=1e-6)
    for call in step.calls:  # time in which copies can hide
        kernels = sum(found.operators[op].runtime for op in call.operators)
        assert step.working(call.begins, call.ends) >= 0.99 * kernels
    for one, other in zip(of_host.values, found.values, strict=True):
        for name in ("let_go", "asked", "again", "ended"):  # negative: never
            assert (getattr(one, name) < 0) == (getattr(other, name) < 0)
            if getattr(one, name) < 0:
                assert getattr(other, name) == getattr(one, name)
    kernels = sum(one.runtime for one in found.operators)
    assert step.forward_ends >= 0.99 * kernels / (2 if make is programs.accumulation else 1)


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("seed", range(3))
def test_predicted_bytes_do_not_change(make, seed):
    planned = planning(make)
    measured = planned.measured
    device = replace(measured, profile=not_waiting(measured.profile), on_accelerator=True)
    there, here = Simulator(device), planned.simulator
    choices = planned.chooser.of_calls(planned.chosen(planned.random_sets(seed)))

    assert there.plain.peak == here.plain.peak
    assert there.estimate(choices).peak == here.estimate(choices).peak
    assert there.estimate(choices).replays == here.estimate(choices).replays


@pytest.mark.parametrize("make", PROGRAMS)
def test_replays_of_small_kernels_take_the_time_of_the_host(make):
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

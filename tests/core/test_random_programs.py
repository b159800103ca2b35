"""Random programs give the gradients of plain eager, bit for bit, or raise as eager raises.

What is compared: every live tensor, the inputs, their gradients and the random states, after the
forward and at the end; the gradients that autograd returns; the type of each exception. ebb alone
may raise only to refuse: in a backward, after a write to what an ended region may have to read.

On the test device three streams and two devices take turns, kernels run late, and a race that eager
does not have is a difference.

Where allocations fail, what ebb could try again gives the same all the same.

EBB_TEST_PROGRAMS=n runs n programs in place of 2,000, EBB_TEST_SEED=n other ones than CI's,
EBB_TEST_REGIONS=n has n outermost regions in each, one after the other:

    EBB_TEST_SEED=1 EBB_TEST_PROGRAMS=100000 pytest -k give_what_eager_gives test_random_programs.py
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import ebb
from ebb import _testing
from ebb_tests.exactness import (
    DEVICE,
    FAILING,
    PAGING,
    accelerator,
    is_harmless,
    late,
    replayed,
    run_random_programs,
)
from ebb_tests.programs.random_programs import Instruction, Machine, Observation, Plan, Program
from ebb_tests.programs.random_writes import KINDS, WRITE_KINDS, other_device

BYTE = st.integers(0, 255)
REGIONS = int(os.environ.get("EBB_TEST_REGIONS", "1"))  # at least so many, outermost


def instructions(kinds: list, least: int, most: int) -> st.SearchStrategy[list[Instruction]]:
    one = st.tuples(st.integers(0, len(kinds) - 1), BYTE, BYTE, BYTE)
    return st.lists(one, min_size=least, max_size=most)


PROGRAMS = st.builds(
    Program,
    wide=st.integers(0, 1),
    begin=st.integers(0, 3),
    policy=BYTE,
    body=instructions(KINDS, 10, 25),
    writes=instructions(WRITE_KINDS, 0, 2),
    plan=st.builds(Plan, BYTE, st.tuples(BYTE, BYTE, BYTE), BYTE, BYTE),
)


def run(program: Program, regions: bool, sees_all: bool = False) -> Machine:
    """`sees_all`: writes that ebb cannot see are left out."""
    if DEVICE == "cpu":
        return run_here(program, regions, sees_all)
    before = torch.accelerator.current_stream(DEVICE)
    late.synchronize()
    late.findings()
    # Threads of two devices add gradients in the order in which they come.
    crosses = other_device in [KINDS[kind % len(KINDS)] for kind, *_ in program.body]
    with (
        late.delayed(50, 200) if program.begin % 2 else contextlib.nullcontext(),
        torch.autograd.set_multithreading_enabled(not crosses),
    ):
        try:
            machine = run_here(program, regions, sees_all)
        finally:
            late.synchronize()
            torch.accelerator.set_stream(before)
    machine.findings = [one for one in late.findings() if not is_harmless(one)]
    return machine


def run_here(program: Program, regions: bool, sees_all: bool) -> Machine:
    torch.manual_seed(1)
    ebb.reset_stats()
    if FAILING:
        number = zlib.crc32(repr(program).encode())
        asks = number % 4 != 0  # else allocations fail
        every = (4 if asks else 30) if regions else 0
        most = 4096  # states of generators are larger
        _testing.fail_allocations(every, number, most=most, is_anywhere=asks, only_asks=asks)
    if PAGING:
        ebb.experimental.paging.reset()
        ebb.config.paging.headroom = 1000
    machine = Machine(regions, program.wide % 2 == 1, sees_all)

    def write(instructions: list[Instruction]) -> None:
        for i, instruction in enumerate(instructions):
            machine.execute(i, instruction, WRITE_KINDS)

    def leave_all() -> None:
        while machine.open:
            machine.step("region ends", machine.leave)

    length = max(1, -(-(len(program.body) - program.begin) // REGIONS))
    begins = range(program.begin, len(program.body), length)
    for i, instruction in enumerate(program.body):
        if i in begins:
            leave_all()
            policy = program.policy + i - program.begin
            machine.step("a region", lambda choice=policy: machine.enter(choice))
        machine.execute(i, instruction, KINDS)
    leave_all()
    machine.no_grad = machine.autocast = 0
    if DEVICE == "cpu" or program.begin > 1:  # a look waits for the device
        machine.observe_state("after forward")
    write(program.writes[::2])
    if not machine.halted:
        between = program.writes[1::2]
        machine.step("plan", lambda: machine.backward(program.plan, lambda: write(between)))
    machine.observe_state("at the end")
    machine.replays += replayed()
    machine.failures = _testing.failed_allocations() if FAILING else 0
    return machine


def is_refusal(eager: Observation, ours: Observation) -> bool:
    """ebb would read what was written; an error "where eager raises too" is not meant."""
    names = (
        "ebb must recompute aten::",
        "ebb: cannot recompute aten::",
        "ebb: cannot restore the output of aten::",
    )
    named = any(name in ours.message for name in names) and "in region '" in ours.message
    return ours.seen == "RuntimeError" and named and eager.refusable


def check(program: Program, sees_all: bool = False) -> str:
    """What the program came to: gradients, an error, nothing to differentiate, or a refusal.

    A refusal counts as "overwritten" if the program is not refused when it leaves out the writes
    that ebb cannot see: those bytes are nowhere any more. Otherwise it counts as "refused".
    """
    eager = run(program, regions=False, sees_all=sees_all)
    ours = run(program, regions=True, sees_all=sees_all)
    if eager.findings:
        return "eager races"
    assert not ours.findings, ours.findings[0]
    for e, a in zip(eager.observed, ours.observed, strict=False):
        if "fault injected" in a.message:
            return "out of memory"
        if (e.what, e.seen) == (a.what, a.seen):
            continue
        if is_refusal(e, a):
            return (
                "refused"
                if sees_all or check(program, sees_all=True) == "refused"
                else "overwritten"
            )
        again = run(program, regions=False, sees_all=sees_all).observed
        if [o.seen for o in again] != [o.seen for o in eager.observed]:
            return "eager differs"  # it read uninitialised memory
        steps = "\n".join(f"{o.what}: {o.seen}" for o in ours.observed if type(o.seen) is not list)
        raise AssertionError(f"{difference(e, a)}\n{steps}")
    assert len(eager.observed) == len(ours.observed)
    if ours.halted:
        return "error"
    if not any(o.what.endswith("backward") for o in ours.observed):
        return "nothing"
    if FAILING and ours.failures:
        return "failed and replayed" if ours.replays else "failed"
    return "replayed" if ours.replays else "not replayed"


def difference(e: Observation, a: Observation) -> str:
    if isinstance(e.seen, list) and isinstance(a.seen, list):
        which = [i for i, (x, y) in enumerate(zip(e.seen, a.seen, strict=False)) if x != y]
        return f"{e.what}: {which} of {len(e.seen)} and {len(a.seen)} differ"
    return f"{e.what}: {e.seen} {e.message}\n{a.what}: {a.seen} {a.message}"


def check_many(count: int, base: int | None) -> Counter[str]:
    came_to: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=base is None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(PROGRAMS)
    def gives_what_eager_gives(program: Program) -> None:
        came_to[check(program)] += 1

    if base is not None:
        gives_what_eager_gives = seed(base)(gives_what_eager_gives)
    gives_what_eager_gives()
    return came_to


def check_share(share: int, **environment: str) -> tuple[Counter[str], int]:
    """Runs one in `share` of the programs that EBB_TEST_PROGRAMS asks for. Returns how many."""
    count = int(os.environ.get("EBB_TEST_PROGRAMS", "2000")) // share
    base = os.environ.get("EBB_TEST_SEED")
    came_to = run_random_programs(count, None if base is None else int(base), **environment)
    assert came_to.total() >= count
    return came_to, count


def assert_not_vacuous(came_to: Counter[str], count: int) -> None:
    """Hypothesis draws constants of ebb's source too, and variations of programs that it has drawn:
    so numbers of rare outcomes change with the source, and come in groups.
    """
    assert came_to.total() >= count
    assert came_to["replayed"] > (0.1 if PAGING else 0.5) * count
    assert count // 2_000 <= came_to["overwritten"] < 0.05 * count
    assert came_to["refused"] < 0.01 * count
    assert 0 < came_to["error"] < 0.3 * count
    assert came_to["eager differs"] < 0.01 * count


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.sweep)])
def test_random_programs_give_what_eager_gives(share):
    assert_not_vacuous(*check_share(share))


@pytest.mark.sweep
def test_random_programs_in_several_regions():
    came_to, count = check_share(8, EBB_TEST_REGIONS="4")

    assert came_to["replayed"] > 0.4 * count
    assert came_to["overwritten"] < 0.05 * count
    # A later region, too, may write what an ended one has to read.
    assert came_to["refused"] < 0.03 * count


FAILING_TOO = {
    "keeping": {},
    "offload": {"EBB_TEST_OFFLOAD": "prompt"},
    "ahead": {"EBB_TEST_AHEAD": "1"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("environment", FAILING_TOO.values(), ids=FAILING_TOO)
def test_random_programs_whose_allocations_fail(environment):
    """Or for which ebb is only asked for memory. If no region has anything to give up, the program
    raises, and has given what eager gives so far.
    """
    came_to, count = check_share(4 if environment else 1, EBB_TEST_FAILING="1", **environment)

    assert came_to["failed"] + came_to["failed and replayed"] > 0.4 * count
    assert came_to["failed and replayed"] > 0.1 * count
    assert came_to["out of memory"] < 0.4 * count


ON_A_DEVICE = {
    "offload": {"EBB_TEST_DEVICE": "late", "EBB_TEST_OFFLOAD": "device"},
    "page": {"EBB_TEST_DEVICE": "late", "EBB_TEST_PAGING": "1"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("environment", ON_A_DEVICE.values(), ids=ON_A_DEVICE)
def test_random_programs_on_the_test_device(environment):
    came_to, count = check_share(4, **environment)

    assert came_to["replayed"] > 0.1 * count
    assert came_to["error"] < 0.3 * count
    assert came_to["eager races"] < 0.05 * count
    assert came_to["eager differs"] < 0.01 * count


@pytest.mark.slow
@pytest.mark.parametrize("base", range(5))
def test_more_random_programs_give_what_eager_gives(base):
    assert_not_vacuous(run_random_programs(4_000, base), 4_000)


if __name__ == "__main__":
    torch.set_num_threads(1)
    count, *base = map(int, sys.argv[1:])
    with accelerator():
        print(json.dumps(check_many(count, base[0] if base else None)))

"""Runs random programs in regions and in plain eager, and compares what happens.

    PYTHONPATH=tests python -m ebb_tests.programs.compared_programs 1000 --engine "offload late"

prints the number of programs by outcome, in JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import zlib
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.engines import BY_NAME, current
from ebb_tests.exactness import replayed, run_process
from ebb_tests.programs.random_programs import Instruction, Machine, Observation, Plan, Program
from ebb_tests.programs.random_writes import WRITE_KINDS, kinds_for, other_device

BYTE = st.integers(0, 255)


@dataclasses.dataclass
class Options:
    regions: int = 1  # at least so many, outermost
    failing: bool = False  # allocations fail


OPTIONS = Options()


def instructions(kinds: list, least: int, most: int) -> st.SearchStrategy[list[Instruction]]:
    one = st.tuples(st.integers(0, len(kinds) - 1), BYTE, BYTE, BYTE)
    return st.lists(one, min_size=least, max_size=most)


def programs() -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        wide=st.integers(0, 1),
        begin=st.integers(0, 3),
        policy=BYTE,
        body=instructions(kinds_for(current()), 10, 25),
        writes=instructions(WRITE_KINDS, 0, 2),
        plan=st.builds(Plan, BYTE, st.tuples(BYTE, BYTE, BYTE), BYTE, BYTE),
    )


def run(program: Program, regions: bool, sees_all: bool = False) -> Machine:
    """`sees_all`: writes that ebb cannot see are left out."""
    engine = current()
    if not engine.is_on_device:
        return run_here(program, regions, sees_all)
    kinds = kinds_for(engine)
    before = torch.accelerator.current_stream(engine.device)
    late.synchronize()
    late.findings()
    # Threads of two devices add gradients in the order in which they come.
    crosses = other_device in [kinds[kind % len(kinds)] for kind, *_ in program.body]
    with (
        late.delayed(50, 200) if program.begin % 2 else contextlib.nullcontext(),
        torch.autograd.set_multithreading_enabled(not crosses),
    ):
        try:
            machine = run_here(program, regions, sees_all)
        finally:
            late.synchronize()
            torch.accelerator.set_stream(before)
    machine.findings = [one for one in late.findings() if not engine.is_harmless(one)]
    return machine


def run_here(program: Program, regions: bool, sees_all: bool) -> Machine:
    engine = current()
    kinds = kinds_for(engine)
    torch.manual_seed(1)
    ebb.reset_stats()
    if OPTIONS.failing:
        number = zlib.crc32(repr(program).encode())
        asks = number % 4 != 0  # else allocations fail
        every = (4 if asks else 30) if regions else 0
        most = 4096  # states of generators are larger
        _testing.fail_allocations(every, number, most=most, is_anywhere=asks, only_asks=asks)
    if engine.pages:
        ebb.experimental.paging.reset()
        ebb.config.paging.headroom = 1000
    machine = Machine(regions, program.wide % 2 == 1, sees_all)

    def write(instructions: list[Instruction]) -> None:
        for i, instruction in enumerate(instructions):
            machine.execute(i, instruction, WRITE_KINDS)

    def leave_all() -> None:
        while machine.open:
            machine.step("region ends", machine.leave)

    length = max(1, -(-(len(program.body) - program.begin) // OPTIONS.regions))
    begins = range(program.begin, len(program.body), length)
    for i, instruction in enumerate(program.body):
        if i in begins:
            leave_all()
            policy = program.policy + i - program.begin
            machine.step("a region", lambda choice=policy: machine.enter(choice))
        machine.execute(i, instruction, kinds)
    leave_all()
    machine.no_grad = machine.autocast = 0
    if not engine.is_on_device or program.begin > 1:  # a look waits for the device
        machine.observe_state("after forward")
    write(program.writes[::2])
    if not machine.halted:
        between = program.writes[1::2]
        machine.step("plan", lambda: machine.backward(program.plan, lambda: write(between)))
    machine.observe_state("at the end")
    machine.replays += replayed()
    machine.failures = _testing.failed_allocations() if OPTIONS.failing else 0
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
    """Runs a program and returns its outcome: gradients, an error, nothing to differentiate, or
    a refusal.

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
    if OPTIONS.failing and ours.failures:
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
    @given(programs())
    def gives_what_eager_gives(program: Program) -> None:
        came_to[check(program)] += 1

    if base is not None:
        gives_what_eager_gives = seed(base)(gives_what_eager_gives)
    gives_what_eager_gives()
    return came_to


def run_random_programs(
    count: int,
    base: int | None = None,
    *,
    engine: str = "plain",
    device: str = "",
    regions: int = 1,
    failing: bool = False,
) -> Counter[str]:
    """Runs random programs. Returns the number of programs by outcome.

    In a process of its own: hypothesis also draws constants that it finds in loaded modules. Which
    programs a seed gives must not depend on the tests that ran before.

    Args:
        base: a seed for other programs.
        device: in place of the engine's.
        regions: at least so many outermost regions in each, one after the other.
        failing: allocations fail.
    """
    command = ["-W", "ignore", "-m", __name__, str(count), f"--engine={engine}"]
    command += [f"--device={device}", f"--regions={regions}"]
    command += [f"--base={base}"] if base is not None else []
    command += ["--failing"] if failing else []
    found = run_process(command, PYTHONPATH=os.pathsep.join(sys.path))
    return Counter(json.loads(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares random programs with plain eager.")
    parser.add_argument("count", type=int)
    parser.add_argument("--base", type=int)
    parser.add_argument("--engine", choices=BY_NAME, default="plain")
    parser.add_argument("--device", default="")
    parser.add_argument("--regions", type=int, default=1)
    parser.add_argument("--failing", action="store_true")
    given = parser.parse_args()
    OPTIONS.regions, OPTIONS.failing = given.regions, given.failing
    if given.failing:
        ebb._C.keep_while_there_is_room(1 << 60)
    engine = BY_NAME[given.engine]
    torch.set_num_threads(1)
    with dataclasses.replace(engine, device=given.device or engine.device).active():
        print(json.dumps(check_many(given.count, given.base)))


if __name__ == "__main__":
    main()

"""The engines under which the tests of exactness run.

An engine is a set of policies, a device, and settings of ebb. A test runs under an engine as a test
of its own, with the engine's name in its id: ``test_x[offload late-offload_all]``. A module says
under which groups of engines its tests run::

    pytestmark = pytest.mark.engines("exactness", "device")

A test that asks for the parameter `policy` and has the mark `each_policy` runs once with each of
the engine's policies. `current` is the engine of the running test. tests/conftest.py has the rest.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.replays import delays, replays_ahead
from ebb_tests.stand_ins import fake_accelerator

Context = Callable[[], contextlib.AbstractContextManager[object]]
Policies = Mapping[str, ebb.Policy]


def policies_that_keep(keep: int) -> Policies:
    """With OFFLOAD or PAGE in place of SAVE, other policies would test less."""
    if keep == ebb.SAVE:
        keys = ("aten::mul", "aten::add_", "aten::sin", "aten::e*")
        return {
            "recompute_all": ebb.policies.recompute_all,
            "save_all": ebb.policies.save_all,
            "save_matmuls": ebb.policies.save_matmuls,
            "torchtitan": ebb.policies.torchtitan,
            "mixed": ebb.Policy(dict.fromkeys(keys, ebb.SAVE)),
        }
    kind = "page" if keep == ebb.PAGE else "offload"
    mixed = dict.fromkeys(("aten::mul", "aten::add_", "aten::e*"), keep)
    return {
        f"{kind}_all": ebb.Policy(default=keep, inputs=keep),
        **({} if kind == "page" else {"offload_inputs": ebb.policies.offload_inputs}),
        f"{kind}_mixed": ebb.Policy({**mixed, "aten::mm": ebb.SAVE}, inputs=keep),
    }


def policies_each_time(keep: int) -> Policies:
    """RECOMPUTE_EACH_TIME, alone and with other decisions."""
    each_time = ebb.RECOMPUTE_EACH_TIME
    return {
        "each_time": ebb.Policy(default=each_time),
        "some_held": ebb.Policy(
            [ebb.Rule("*", ebb.RECOMPUTE, every=3)], default=each_time, inputs=keep
        ),
        "writes_held": ebb.Policy({"aten::*_": ebb.RECOMPUTE}, default=each_time),
        "writes_each_time": ebb.Policy({"aten::*_": each_time}),
        "some_kept": ebb.Policy(
            {
                "aten::mul": keep,
                "aten::add_": ebb.RECOMPUTE,
                "aten::sin": ebb.RECOMPUTE,
                "aten::e*": keep,
            },
            default=each_time,
        ),
    }


@dataclass(frozen=True, eq=False)
class Engine:
    """The policies, device and settings under which a test of exactness runs.

    Attributes:
        name: in the ids of tests; has no "-".
        group: modules name groups: "exactness"; "device": on the test device, which only processes
            have that test nothing else (see on_device.py); "checked": in verify mode or with
            reports.
        runs: "always", "sweep" or "slow".
        keep: the decision of policies that keep values: SAVE, OFFLOAD or PAGE.
        each_time: True if policies also decide RECOMPUTE_EACH_TIME.
        device: the default device.
        contexts: settings of ebb, and stand-ins.
    """

    name: str
    group: str = "exactness"
    runs: str = "sweep"
    keep: int = ebb.SAVE
    each_time: bool = False
    device: str = "cpu"
    contexts: tuple[Context, ...] = ()
    policies: Policies = field(init=False)

    def __post_init__(self) -> None:
        policies = policies_each_time if self.each_time else policies_that_keep
        object.__setattr__(self, "policies", policies(self.keep))

    @property
    def dispatch_key(self) -> str:
        """The key of the device's kernels."""
        return "PrivateUse1" if self.is_on_device else "CPU"

    @property
    def is_on_device(self) -> bool:
        return self.device != "cpu"

    @property
    def offloads(self) -> bool:
        return self.keep == ebb.OFFLOAD

    @property
    def pages(self) -> bool:
        return self.keep == ebb.PAGE

    @property
    def replays_ahead(self) -> bool:
        return ahead in self.contexts or ahead_at_once in self.contexts

    @property
    def verifies(self) -> bool:
        return ebb.verify in self.contexts

    @property
    def is_built(self) -> bool:
        """True if this build of ebb has the plug-ins."""
        needed = {"offload": self.offloads, "paging": self.pages, "ahead": self.replays_ahead}
        needed |= {"report": reports in self.contexts, "verify": self.verifies}
        return all(name in ebb._C.plugins for name, is_needed in needed.items() if is_needed)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """In the with-block, this is the current engine."""
        global _current
        with contextlib.ExitStack() as stack:
            if self.is_on_device:
                late.load()
                late.have_pages()
                torch.set_default_device(self.device)
                stack.callback(torch.set_default_device, None)
            for context in self.contexts:
                stack.enter_context(context())
            before, _current = _current, self
            try:
                yield
            finally:
                _current = before

    def is_harmless(self, finding: str) -> bool:
        """True for a write during a copy to the host that nothing will read.

        Backward may need a value before its copy is done. The value then stays on the device and
        may be written. A needed copy would give wrong bits, since streams run as late as possible.
        """
        return self.offloads and finding.startswith("read and write: copy to host")

    def has(self, test: pytest.Function | pytest.Item) -> bool:
        """False if the marks of `test` say that it tests nothing under this engine."""
        if self.replays_ahead and test.get_closest_marker("replays"):
            return False
        return not (
            self.verifies
            and any(
                self.is_on_device or not mark.kwargs.get("on_device", False)
                for mark in test.iter_markers("not_in_verify_mode")
            )
        )

    def parameter(self, *more: object, ids: Iterable[str] = ()) -> object:
        """For pytest.mark.parametrize. The plain engine isn't in the ids."""
        marks = [] if self.runs == "always" else [getattr(pytest.mark, self.runs)]
        names = [*([] if self is PLAIN else [self.name]), *ids]
        return pytest.param(self, *more, marks=marks, id="-".join(names) or pytest.HIDDEN_PARAM)


@contextlib.contextmanager
def offload_settings(**settings: object) -> Iterator[None]:
    with ebb.config.patch({f"offload.{name}": value for name, value in settings.items()}):
        yield


@contextlib.contextmanager
def disk_tier() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, offload_settings(disk=folder, min_bytes=0):
        yield


def copies_late() -> contextlib.AbstractContextManager[object]:
    """A fake accelerator that copies as late as possible."""
    return fake_accelerator(in_flight_bytes=1 << 40)


def copies_promptly() -> contextlib.AbstractContextManager[object]:
    return fake_accelerator(in_flight_bytes=0)


def from_one_byte() -> contextlib.AbstractContextManager[object]:
    return offload_settings(min_bytes=1)


def ahead() -> contextlib.AbstractContextManager[object]:
    """Replays ahead, as much as possible."""
    return replays_ahead(regions=2)


@contextlib.contextmanager
def ahead_at_once() -> Iterator[None]:
    """Each region is replayed as soon as it is left, with random delays."""
    with ahead(), delays(50):
        _testing.replay_when_closed(True)
        try:
            yield
        finally:
            _testing.replay_when_closed(False)


def reports() -> contextlib.AbstractContextManager[object]:
    return ebb.record_reports(2)


OFFLOAD, PAGE = {"keep": ebb.OFFLOAD}, {"keep": ebb.PAGE}
EACH_TIME = {"each_time": True}
DEVICE = {"group": "device"}
# In these, the tests that also run under "each time" take minutes.
SLOW = {"runs": "slow"}
CHECKED = {"group": "checked"}

PLAIN = Engine("plain", runs="always")
ENGINES = [
    PLAIN,
    Engine("ahead", runs="always", contexts=(ahead,)),
    Engine("ahead at once", contexts=(ahead_at_once,)),
    Engine("offload late", runs="always", **OFFLOAD, contexts=(copies_late,)),
    Engine("offload prompt", **OFFLOAD, contexts=(copies_promptly,)),
    Engine("offload disk", **OFFLOAD, contexts=(disk_tier,)),
    Engine("page", **PAGE),
    Engine("each time", **EACH_TIME),
    Engine("each time, ahead", **EACH_TIME, **SLOW, contexts=(ahead_at_once,)),
    Engine("each time, offload", **EACH_TIME, **SLOW, **OFFLOAD, contexts=(copies_late,)),
    Engine("each time, page", **EACH_TIME, **SLOW, **PAGE),
    Engine("device", **DEVICE, device="late:0"),
    # late:0 stays the current device
    Engine("device, offload", **DEVICE, **OFFLOAD, device="late:1", contexts=(from_one_byte,)),
    Engine("device, page", **DEVICE, **PAGE, device="late:1"),
    Engine("verify", **CHECKED, contexts=(ebb.verify,)),
    Engine("verify, each time", **CHECKED, **SLOW, **EACH_TIME, contexts=(ebb.verify,)),
    Engine("verify, device", **CHECKED, **SLOW, device="late:0", contexts=(ebb.verify,)),
    Engine(
        "verify, device, offload",
        **CHECKED,
        **SLOW,
        **OFFLOAD,
        device="late:1",
        contexts=(from_one_byte, ebb.verify),
    ),
    Engine("reports", **CHECKED, contexts=(reports,)),
]
BY_NAME = {engine.name: engine for engine in ENGINES}
GROUPS = {engine.group for engine in ENGINES}
_current = PLAIN


def current() -> Engine:
    """The engine under which the running test runs."""
    return _current


def engines_of(test: pytest.Function) -> list[Engine]:
    """The engines under which a test runs: PLAIN and, by its marks, others."""
    if test.get_closest_marker("once") or (mark := test.get_closest_marker("engines")) is None:
        return [PLAIN]
    assert {*mark.args} <= GROUPS, mark.args
    return [
        engine
        for engine in ENGINES
        if engine is PLAIN or (engine.group in mark.args and engine.is_built and engine.has(test))
    ]

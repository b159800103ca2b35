"""The processes of a job agree whether a step was valid; the error of an invalid step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ebb import _C
from ebb._support.store_exchange import StoreExchange, exchange_of


class PageOverflowError(RuntimeError):
    """A page pool was too small for a tensor, so the gradients of this step are invalid.

    Raised in the step if ``overflow="blocking"``, and by an optimizer that is about to use such
    gradients. Clear the gradients and run the step again, or let ``run_step`` do so.
    """

    __module__ = "ebb.experimental"  # the name for users and pickles


# Note [Ranks agree on a step]
# In a meeting, each process reports if the step is valid so far, and reads the reports of all, by
# a `gather` of Note [Ranks exchange values through a store]. Each run of a step's function has its
# own meetings, numbered from 0. A process joins a meeting:
#  1. before the first optimizer of the run steps;
#  2. when the function calls step_ok();
#  3. after the function has returned, repeatedly until all have returned. So ranks may differ in
#     the number of optimizers and of calls of step_ok().
# A rank whose function raised reports this at its next meeting and does not wait; later meetings do
# not count it. The step runs again only if all ranks take part and no gradients have been used,
# that is, no meeting of kind 1 or 2 has found the step valid.
_OVERFLOW = "overflow"  # a pool was too small, and this process can run the step again
_BROKEN = "broken"  # paging failed, and this process cannot run the step again
_FAILED = "failed"  # the function raised an error unrelated to paging

USED = (
    "An optimizer inside run_step() had already stepped, or step_ok() had returned True, so the "
    "step cannot be run again, and some parameters may already be updated. Call run_step() once "
    "for each optimizer, with the forwards and backwards that belong to it."
)
_HALF_WAY = (
    "ebb: paging failed ({errors}), and the function passed to run_step() raised before it "
    "returned, so the step cannot be run again: other processes may wait in collectives that this "
    "process did not reach. Do not raise inside the function: check for non-finite gradients "
    "after run_step(), or after step_ok() has returned True in all processes."
)

_LATE = (
    "processes reached the check whether the step of paging is valid (the timeout is "
    "init_process_group's). Likely causes: 1. a process does not call run_step() or step_ok(), or "
    "has ended; 2. a process waits in a collective that the function passed to run_step() calls "
    "after the optimizer. Move that collective after run_step()."
)

_exchanges: weakref.WeakKeyDictionary[Any, StoreExchange] = weakref.WeakKeyDictionary()  # by group


def _exchange_with(group: Any) -> StoreExchange | None:
    """None if this process is alone, or not in the group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    if group in _exchanges:
        return _exchanges[group]
    exchange = exchange_of(
        group, "ebb/paging", waiting="ebb.experimental.paging.run_step() and step_ok()"
    )
    if exchange is not None:
        _exchanges[group] = exchange
    return exchange


def _errors() -> int:
    with contextlib.suppress(RuntimeError):  # the device may have failed
        return _C.paging_errors()[0]
    return 0


class Agreement:
    """An agreement on one run of a step's function. See Note [Ranks agree on a step]."""

    def __init__(self, group: Any) -> None:
        self._exchange = _exchange_with(group)
        self._run = 0 if self._exchange is None else next(self._exchange.rounds)
        self._meeting = 0
        self._absent = 0  # processes that have left the run
        self._is_final = False  # True: the step cannot be run again
        self.used = False  # True if any process may have used the gradients
        self.refusal = ""  # why the gradients are invalid; empty while no error is known

    @property
    def is_alone(self) -> bool:
        return self._exchange is None

    def is_of(self, group: Any) -> bool:
        return self._exchange is _exchange_with(group)

    def ask(self, is_good: Callable[[], bool], at_end: bool = False) -> bool:
        """True if the step is valid so far, in all processes; False if a pool was too small in some
        process, so that all run the step again. `is_good` says so of this process, and raises
        RuntimeError if the step cannot be run again. `at_end`: this process has finished its part
        of the run. Raises PageOverflowError if the step is not valid and cannot be run again."""
        going_on = True
        while going_on and not self.refusal:
            try:
                word = "" if is_good() else _OVERFLOW
            except RuntimeError:
                self._report(at_end, _BROKEN)
                raise
            going_on = self._report(at_end, word) and at_end
        if self._is_final:
            raise PageOverflowError(self.refusal)
        return not self.refusal

    def _report(self, at_end: bool, word: str) -> bool:
        """True if some process has not finished its part of the run."""
        if self._exchange is None:
            going_on, said = not at_end, [(0, word)] if word else []
        else:
            meeting = self._next_meeting()
            going_on, said = self._exchange.gather(*meeting, word or None, not at_end, _LATE)
        self._absent += sum(word != _OVERFLOW for _, word in said)
        bad = [rank for rank, word in said if word != _FAILED]
        if bad:
            self._is_final = self.used or self._absent > 0
            self.refusal = self._describe(bad, any(word == _BROKEN for _, word in said))
        self.used |= going_on
        return going_on

    def _describe(self, ranks: list[int], is_broken: bool) -> str:
        where = "" if self.is_alone else f" on rank {', '.join(map(str, ranks))} of the group"
        if is_broken:
            return (
                f"ebb: paging failed{where}, and running the step again would not help. The "
                "gradients are invalid in all processes of the group; see the error of that rank."
            )
        if self.used:
            then = USED
        elif self._absent:
            then = "The step cannot be run again: another process has raised another error in it."
        else:
            then = "ebb.experimental.paging.run_step() catches this error and runs the step again."
        return (
            f"ebb: a page pool was too small{where}, so the gradients of this step are invalid. "
            f"{then}"
        )

    def _next_meeting(self) -> tuple[str, int]:
        assert self._exchange is not None
        key = f"{self._run}/{self._meeting}"
        self._meeting += 1
        return key, self._exchange.size - self._absent

    def leave(self) -> None:
        """Tell the other processes, without waiting, that this one joins no later meeting."""
        if self._exchange is not None and not self.refusal:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                word = _BROKEN if _errors() else _FAILED
                self._exchange.give(*self._next_meeting(), word)

    @contextlib.contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def runs_again_after(self, error: Exception) -> bool:
        """True if all processes run the step again although the function raised here. Raises
        PageOverflowError if paging failed and the step cannot be run again."""
        if self.refusal:
            return not self._is_final
        errors = _errors()
        self.leave()
        if not errors or (isinstance(error, PageOverflowError) and not self.is_alone):
            return False
        if not self.is_alone:
            with contextlib.suppress(RuntimeError):
                _C.paging_step_ok()  # marks the errors as reported to the user
            described = _C.describe_page_errors(errors)
            raise PageOverflowError(_HALF_WAY.format(errors=described)) from error
        return not self.ask(_C.paging_step_ok, at_end=True)

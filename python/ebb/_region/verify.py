"""Verify mode: every replay is compared, bit for bit, with what the forward computed."""

from __future__ import annotations

from types import TracebackType

from ebb import _C
from ebb._support.shown import shown

_MODES = ("off", "raise", "demote")  # in the order of ebb::VerifyMode in C++


class ReplayMismatch(RuntimeError):
    """A value that was recomputed in verify mode is not what the forward computed.

    Attributes:
        region: the name of the region in which the difference begins.
        op: the operator with which it begins, such as ``"aten::mul.Tensor"``.
        output: which of its outputs, such as ``"result 0"``.
        largest_difference: between two elements of it; infinity if one of them is no number.
    """

    __module__ = "ebb"  # where users, and pickles, find it

    def __init__(
        self, message: str, region: str, op: str, output: str, largest_difference: float
    ) -> None:
        super().__init__(message)
        self.region = region
        self.op = op
        self.output = output
        self.largest_difference = largest_difference

    def __reduce__(self) -> tuple[object, ...]:
        return (
            ReplayMismatch,
            (str(self), self.region, self.op, self.output, self.largest_difference),
        )


class verify:
    """Switches verify mode on, in the whole process, for regions that are entered from now on.

    Takes effect at once; as a context manager it sets the mode back at the end. In this mode each
    value that backward needs is recomputed, even where its tensor is still alive, and compared bit
    for bit with what the forward left in memory. That finds programs which write to tensors behind
    torch's back (see :class:`ebb.opaque`) and operators that give other results when they run
    again. What ebb drops is overwritten before it is freed (NaN in floating-point tensors, bytes of
    0xA5 in others), so that a raw pointer into it does not look right by accident. Slow, and it
    needs the memory that the regions would have saved; for finding, not for training.

    The environment variable ``EBB_VERIFY`` (``0``, ``1`` or ``demote``) sets it for a process.

    Args:
        mode: ``"raise"``: a difference raises :class:`ebb.ReplayMismatch` in backward;
            ``"demote"``: it warns once per operator, uses the right bytes, and saves the outputs of
            that operator from then on; ``"off"``.

    Raises:
        ValueError: ``mode`` is none of these.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> with ebb.verify():
        ...     with ebb.region():
        ...         loss = (x * 2).sin().sum()
        ...     loss.backward()
    """

    def __init__(self, mode: str = "raise") -> None:
        if mode not in _MODES:
            raise ValueError(f"ebb: verify takes 'raise', 'demote' or 'off'; got {shown(mode)}")
        self._before = _C.set_verify_mode(_MODES.index(mode))

    def __enter__(self) -> verify:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _C.set_verify_mode(self._before)

"""Time limits for tests on a machine that runs other work too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

HANGS = 600  # seconds; work that does not hang takes far less


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Checks that the with-block takes less than `seconds` of this thread's processor time.

    Wall time would depend on other work on the machine.
    """
    begin = time.thread_time()
    yield
    assert time.thread_time() - begin < seconds

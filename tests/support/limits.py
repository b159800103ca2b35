"""Time limits for tests on a machine that runs other work too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

HANGS = 600  # seconds; work that does not hang takes far less


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is inside takes no more time of the processor, in this thread. The clock on the wall
    goes on while others have the processor.
    """
    begin = time.thread_time()
    yield
    assert time.thread_time() - begin < seconds

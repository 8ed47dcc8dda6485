"""Not to outlive the parent while something slow goes on that looks at nothing: imports, loading a model."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_log: Final = logging.getLogger("chatserve.engine")


@contextlib.contextmanager
def ends_with_parent(pipe: int | None) -> Iterator[None]:
    """End the process at once if the other end of `pipe` closes in here. None: nobody wants to be missed."""
    if pipe is None:
        yield
        return
    done_out, done_in = os.pipe()
    watching = threading.Thread(target=_watch, args=(pipe, done_out), name="parent watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(done_in)
        watching.join()
        os.close(done_out)


def _watch(pipe: int, done: int) -> None:
    while True:
        ready, _, _ = select.select([pipe, done], [], [])
        if done in ready:
            return
        if not os.read(pipe, 4096):
            _log.info("the parent process is gone")
            os._exit(0)  # as a kill would: whoever comes next clears away what is left, and may be waiting

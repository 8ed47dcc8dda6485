"""What kept the store from starting, as one line that says what to do.

Pure: the server's own last words or the system's error in, a sentence out.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path


def explain_log(said: str, directory: Path, binary: Path) -> str:
    """What a server said before it gave up, as one line with advice."""
    if "No space left on device" in said:
        return f"the store cannot start: the disk that holds {directory} is full; free some space"
    if "Permission denied" in said or "Read-only file system" in said:
        return f"the store cannot start: {directory} or a file in it cannot be written; check its owner and mode"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    damaged = re.search(r"append only file (\S+?):", said)
    if damaged is not None:
        tool, file = binary.name.replace("server", "check-aof"), directory / "appendonlydir" / damaged[1]
        repair = f"bash -c {shlex.quote(shlex.join(['exec', '-a', tool, str(binary), '--fix', str(file)]))}"
        return (
            f"the store cannot start: its append-only file is damaged; copy {directory}, then cut the file off where "
            f"the damage begins with: {repair} (it said: {last})"
        )
    return f"the store cannot start; the end of {directory / 'store.log'} says: {last}"


def advise_os_error(error: OSError) -> str:
    """Why the store's directory could not be made or written, with what to do."""
    what = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"{what}; free some space"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR | errno.EEXIST:
            return f"{what} ({error.filename}); choose a --data-dir that you can write"
        case _:
            return what

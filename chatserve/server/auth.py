"""Who a token belongs to.

Owns the tokens file and the comparison. A line is `USER:HASH`, the SHA-256 of the token in hexadecimal; blank lines and
lines that begin with `#` are left out. The file is looked at again when it changes; a broken new version is logged and
the one before it stays in force. Without a file everyone is `local`, which is why the server then binds loopback only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Final

from chatserve.errors import StartupError
from chatserve.types import LOCAL_USER, UserId

_log = logging.getLogger(__name__)

_USER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")

_Stamp = tuple[int, int, int]


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(32)


def token_line(user: str, token: str) -> str:
    """The line that lets `token` in as `user`.

    Raises:
        StartupError: the name is not one that a user may have.
    """
    if not _USER.fullmatch(user):
        raise StartupError(f"{user!r} is no user name: use up to 64 of the characters A-Z a-z 0-9 . _ @ -")
    return f"{user}:{_digest(token)}"


def add_token(path: Path, user: str) -> str:
    """Append a new token for `user` to the file, readable by its owner only, and return it: it is kept nowhere.

    Raises:
        StartupError: the name is not one that a user may have, or the file cannot be written.
    """
    token = new_token()
    line = token_line(user, token)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            before = file.read()
            file.write(("" if before.endswith("\n") or not before else "\n") + line + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the tokens file {path} cannot be written: {error}") from error
    return token


def read_tokens(path: Path) -> dict[str, UserId]:
    """Token hashes and their users; to start with there is at least one.

    Raises:
        StartupError: the file cannot be read, a line is malformed, or there is none; names the file and the line.
    """
    users = _read(path)
    if not users:
        raise StartupError(f"{path}: the tokens file names no user; `chatserve token USER` adds one")
    return users


def _read(path: Path) -> dict[str, UserId]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the tokens file {path} cannot be read: {error}") from error
    users: dict[str, UserId] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        user, _, digest = entry.rpartition(":")
        if not _USER.fullmatch(user) or not _HASH.fullmatch(digest):
            raise StartupError(
                f"{path}, line {number}: expected USER:HASH, with the token's SHA-256 in 64 lower-case "
                "hexadecimal digits; `chatserve token USER` makes such a line"
            )
        if users.get(digest, user) != user:
            raise StartupError(f"{path}, line {number}: this token belongs to {users[digest]!r} already")
        users[digest] = UserId(user)
    return users


class Authenticator:
    """Maps tokens to users; `required` tells whether there are tokens at all."""

    def __init__(self, tokens_file: Path | None) -> None:
        """Read the file, if there is one.

        Raises:
            StartupError: it is missing or malformed.
        """
        self._path = tokens_file
        self._stamp: _Stamp | None = None
        self._users: dict[str, UserId] = {}
        if tokens_file is not None:
            self._stamp = _stamp(tokens_file)
            self._users = read_tokens(tokens_file)

    @property
    def required(self) -> bool:
        return self._path is not None

    def user(self, token: str | None) -> UserId | None:
        """The token's user; None: let nobody in."""
        if self._path is None:
            return LOCAL_USER
        self._reload(self._path)
        if not token:
            return None
        digest = _digest(token)
        found: UserId | None = None
        for known, user in self._users.items():
            # All are compared, each in constant time: how long it takes tells nothing of any hash.
            if hmac.compare_digest(known, digest):
                found = user
        return found

    def _reload(self, path: Path) -> None:
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._users = _read(path)  # none, where the last token was taken back
        except StartupError as error:
            _log.error("%s; the tokens read before stay in force", error)


def bearer(authorization: str | None) -> str | None:
    """The token of an `Authorization: Bearer …` header; an empty one where the header is something else."""
    if authorization is None:
        return None
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

"""Tokens: who gets in, and what is said about a file that is not right."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatserve.errors import StartupError
from chatserve.server.auth import Authenticator, add_token, bearer, new_token, read_tokens, token_line


def test_without_a_file_everyone_is_local() -> None:
    authenticator = Authenticator(None)
    assert not authenticator.required
    assert authenticator.user(None) == authenticator.user("whatever") == "local"


def test_a_token_lets_in_its_user_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tokens"
    ada, bob, again = add_token(path, "ada"), add_token(path, "bob@example.org"), add_token(path, "ada")
    assert len({ada, bob, again}) == 3
    assert path.stat().st_mode & 0o077 == 0
    assert ada not in path.read_text()
    authenticator = Authenticator(path)
    assert authenticator.required
    assert [authenticator.user(token) for token in (ada, bob, again)] == ["ada", "bob@example.org", "ada"]
    for wrong in (None, "", ada + "x", ada[:-1], "ada", "\ud800", read_hash(path)):
        assert authenticator.user(wrong) is None


def read_hash(path: Path) -> str:
    return next(iter(read_tokens(path)))


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    ada = add_token(path, "ada")
    authenticator = Authenticator(path)
    bob = add_token(path, "bob")
    assert authenticator.user(bob) == "bob"
    path.write_text("nonsense\n")
    assert authenticator.user(ada) == "ada"
    assert "line 1" in caplog.text
    token = new_token()
    other = tmp_path / "other"
    other.write_text("# only carol\n\n" + token_line("carol", token))
    other.replace(path)
    assert (authenticator.user(ada), authenticator.user(token)) == (None, "carol")
    path.unlink()
    assert authenticator.user(token) == "carol"


def test_the_last_token_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    ada = add_token(path, "ada")
    authenticator = Authenticator(path)
    assert authenticator.user(ada) == "ada"
    path.write_text("# nobody\n")
    assert authenticator.user(ada) is None
    assert authenticator.required


@pytest.mark.parametrize(
    "line", ["ada", "ada:", "ada:123", ":" + "0" * 64, "a b:" + "0" * 64, "ada:" + "g" * 64, "ada " + "0" * 64]
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# users\n{token_line('bob', 't')}\n{line}\n")
    with pytest.raises(StartupError, match="line 3") as refused:
        Authenticator(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_users_with_one_token_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{token_line('ada', 't')}\n{token_line('ada', 't')}\n{token_line('bob', 't')}\n")
    with pytest.raises(StartupError, match=r"line 3.*belongs to 'ada'"):
        Authenticator(path)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        Authenticator(tmp_path / "none")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(StartupError, match="names no user"):
        Authenticator(tmp_path / "empty")


def test_a_file_that_cannot_be_added_to_is_one_line_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"\xff\n")
    for path in (tmp_path, tmp_path / "tokens" / "inside", tmp_path / "tokens"):
        with pytest.raises(StartupError, match="cannot be written") as refused:
            add_token(path, "ada")
        assert "\n" not in str(refused.value)
    assert (tmp_path / "tokens").read_bytes() == b"\xff\n"


def test_a_name_that_could_be_taken_for_something_else_is_refused() -> None:
    for name in ("", "a:b", "a\nb", "x" * 65, "-x"):
        with pytest.raises(StartupError, match="no user name"):
            token_line(name, "t")


def test_the_authorization_header_is_read() -> None:
    assert bearer(None) is None
    assert bearer("Bearer  abc ") == bearer("bearer abc") == "abc"
    assert bearer("Basic abc") == bearer("Bearer") == ""

"""Text as it may be shown: whole characters, no control token, no part of a stop string, however it is split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.chat.detokenizer import Detokenizer, OutputText
from chatserve.chat.prompt import PromptEncoder

HARD_TEXTS = [
    "👩‍👩‍👧‍👦 family",
    "🇩🇪🇯🇵 flags ✊🏽",
    "é ñ ö̲ क्षि",
    "日本語 한국어 العربية",
    "\x00\t\r\n  \U0010ffff",
    "plain words, and    spaces ",
]
ONE_BYTE_EACH = [bytes([byte]) for byte in range(256)]


def split_at(data: bytes, *cuts: int) -> list[bytes]:
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def stream(bytes_of: list[bytes], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(bytes_of)
    return [detokenizer.feed(i) for i in ids]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_no_split_of_a_text_shows_half_a_character(text: str) -> None:
    data = text.encode()
    for cuts in itertools.combinations(range(1, len(data)), 2):
        pieces = split_at(data, *cuts)
        shown = stream(pieces, [0, 1, 2])
        assert "".join(shown) == text
        assert "\ufffd" not in "".join(shown)
        for n in range(3):
            assert text.startswith("".join(shown[: n + 1]))


@pytest.mark.parametrize("kind", ["chatml", "gemma", "llama2"])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_real_tokens_one_at_a_time_give_the_text(encoders: dict[str, PromptEncoder], kind: str, text: str) -> None:
    tokenizer = encoders[kind].tokenizer
    ids = tokenizer.encode_continuation(text)
    shown = stream(tokenizer.bytes_of, list(ids))
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_give_what_decoding_them_at_once_gives_but_for_an_unfinished_end(data: list[int]) -> None:
    whole = bytes(data).decode(errors="replace")
    shown = "".join(stream(ONE_BYTE_EACH, data))
    assert whole.startswith(shown)
    assert whole[len(shown) :].strip("\ufffd") == ""
    assert len(whole) - len(shown) <= 1


@given(st.text(max_size=20), st.data())
def test_a_text_goes_on_after_any_token_with_no_byte_lost(text: str, data: st.DataObject) -> None:
    raw = list(text.encode())
    cut = data.draw(st.integers(0, len(raw)))
    first = Detokenizer(ONE_BYTE_EACH)
    shown = "".join(first.feed(i) for i in raw[:cut])
    second = Detokenizer(ONE_BYTE_EACH)
    second.resume(raw[:cut])
    assert shown + "".join(second.feed(i) for i in raw[cut:]) == text


def test_ids_past_the_vocabulary_are_no_text() -> None:
    assert stream([b"a"], [0, 7, -1, 0]) == ["a", "", "", "a"]


@pytest.mark.parametrize(("answer", "text"), [([b" Yes", b" no"], "Yes no"), ([b"Yes"], "Yes"), ([b"", b" "], "")])
def test_the_templates_own_space_before_an_answer_is_not_shown(answer: list[bytes], text: str) -> None:
    detokenizer = Detokenizer(answer, skip_prefix=" ")
    assert "".join(detokenizer.feed(i) for i in range(len(answer))) == text


# --- stop strings -----------------------------------------------------------------------------------------------------


def ids_of_characters(text: str) -> list[int]:
    """As if each character were a token of its own."""
    return [0x1000 + ord(char) for char in text]


def run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], list[int], OutputText]:
    output = OutputText(Detokenizer(pieces), stop, ids_of_characters)
    sent: list[str] = []
    ids: list[int] = []
    for token in range(len(pieces)):
        piece = output.feed(token)
        sent.append(piece.text)
        ids += piece.token_ids
        if output.stopped:
            return sent, ids, output
    piece = output.flush()
    return [*sent, piece.text], ids + list(piece.token_ids), output


def text_of(ids: list[int], pieces: list[bytes]) -> str:
    return b"".join(chr(i - 0x1000).encode() if i >= 0x1000 else pieces[i] for i in ids).decode()


def expected(text: str, stop: list[str]) -> str:
    """Up to the stop string that is complete first, the longest of those that are so together."""
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("stop", [["STOP"], ["aab"], ["aaa"], ["ö🇩"], ["n\n\nUser:", "\n\nU"], ["x", "not there"]])
def test_a_stop_string_cut_at_any_two_places_leaks_nothing(stop: list[str]) -> None:
    text = "aaaab STOaSTOP äö🇩🇪 then\n\nUser: x"
    data = text.encode()
    want = expected(text, stop)
    for cuts in itertools.combinations(range(1, len(data)), 2):
        pieces = split_at(data, *cuts)
        sent, ids, output = run(pieces, stop)
        assert "".join(sent) == want
        assert output.stopped
        assert text_of(ids, pieces) == want, "kept ids stand for the kept text"
        kept = [i for i in ids if i < 0x1000]
        assert kept == list(range(output.num_kept)), "kept tokens end before the stop string"
        assert len(b"".join(pieces[: output.num_kept]).decode(errors="replace")) <= len(want) + 1


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=25),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=400)
def test_stop_strings_over_two_letters(words: list[str], stop: list[str]) -> None:
    text = "".join(words)
    want = expected(text, stop)
    pieces = [word.encode() for word in words]
    sent, ids, output = run(pieces, stop)
    assert "".join(sent) == want
    assert output.stopped == (want != text or any(s in text for s in stop))
    for n in range(len(sent)):
        assert want.startswith("".join(sent[:n])), "nothing is sent that must be taken back"
    assert text_of(ids, pieces) == want


def test_text_is_held_back_no_longer_than_it_might_become_a_stop_string() -> None:
    sent, _, _ = run([b"aS", b"T", b"x", b"S", b"b"], ["STOP"])
    assert sent == ["", "", "aSTx", "", "Sb", ""]


def test_ids_and_text_are_let_go_together() -> None:
    """So that what is stored is consistent at any moment at which the process may die."""
    family = "👩‍👩‍👧‍👦".encode()
    output = OutputText(Detokenizer(ONE_BYTE_EACH), [], ids_of_characters)
    for token in family:
        piece = output.feed(token)
        assert bytes(piece.token_ids).decode() == piece.text


def test_half_a_character_at_the_end_is_not_shown_but_its_tokens_are_kept() -> None:
    sent, ids, output = run([b"a", b"\xf0\x9f"], [])
    assert "".join(sent) == "a"
    assert ids == [0, 1]
    assert output.num_kept == 2

"""`ChatProtocol`: what each frame becomes, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.server.frames import CLIENT_FRAMES
from chatserve.server.protocol import PONG, Close, CloseCode, Requested, Send, Typed
from tests.server.talking import LIMITS, REQUESTS, error, opened, receive


def test_every_request_of_the_protocol_is_covered_here() -> None:
    assert {*REQUESTS, "hello", "typing", "ping", "pong"} == set(CLIENT_FRAMES)


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_minimal_request_is_parsed_into_its_frame(kind: str) -> None:
    output = receive(opened(), {"type": kind, "id": "1", **REQUESTS[kind], "surprise": [1]})
    assert isinstance(output, Requested)
    assert type(output.request) is CLIENT_FRAMES[kind]
    assert output.request.id == "1"
    for name, value in REQUESTS[kind].items():
        assert getattr(output.request, name) == value


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, fields in REQUESTS.items() for field in ["id", *fields]]
)
def test_a_missing_field_is_a_bad_frame(kind: str, field: str) -> None:
    frame = {"type": kind, "id": "1", **REQUESTS[kind]}
    del frame[field]
    answer = error(opened(), frame)
    assert answer["code"] == "bad_frame"
    assert answer.get("id") == (None if field == "id" else "1")


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("request_id", ["", "x" * 65, 7, None, True, ["1"]])
def test_an_id_is_a_string_of_1_to_64_characters(kind: str, request_id: object) -> None:
    assert error(opened(), {"type": kind, "id": request_id, **REQUESTS[kind]})["code"] == "bad_frame"


def test_the_longest_id_is_taken() -> None:
    assert isinstance(receive(opened(), {"type": "session.list", "id": "é" * 64}), Requested)


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, fields in REQUESTS.items() for field in fields if field != "params"]
)
@pytest.mark.parametrize("value", [7, True, 1.5, ["x"], {"a": 1}])
def test_an_ill_typed_field_is_bad_params_that_name_it(kind: str, field: str, value: object) -> None:
    answer = error(opened(), {"type": kind, "id": "1", **REQUESTS[kind], field: value})
    assert answer["code"] == "bad_params"
    assert answer["id"] == "1"
    assert answer["field"] == field
    assert field in answer["detail"]
    assert "a string" in answer["detail"]
    assert repr(value) in answer["detail"]


@pytest.mark.parametrize("limit", [0, 101, -1, 1.0, 1.5, True, "5", [5]])
def test_the_limit_of_a_list_is_a_whole_number_from_1_to_100(limit: object) -> None:
    answer = error(opened(), {"type": "session.list", "id": "1", "limit": limit})
    assert answer["code"] == "bad_params"
    assert "a whole number from 1 to 100" in answer["detail"]
    assert repr(limit) in answer["detail"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": "hot"}, "params.temperature"),
        ({"temperature": 2.5}, "params.temperature"),
        ({"max_tokens": 1.0}, "params.max_tokens"),
        ({"max_tokens": True}, "params.max_tokens"),
        ({"max_tokens": "5"}, "params.max_tokens"),
        ({"seed": -1}, "params.seed"),
        ({"stop": ["x"] * 9}, "params.stop"),
        ({"stop": "x"}, "params.stop"),
        ([], "params"),
        ("x", "params"),
    ],
)
def test_params_out_of_range_are_bad_params_that_name_the_field(params: object, field: str) -> None:
    answer = error(opened(), {"type": "session.create", "id": "1", "params": params})
    assert (answer["code"], answer["field"]) == ("bad_params", field)


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "9" * 30, "9" * 5000, "-" + "9" * 100_000, "1." + "0" * 5000 + "1e999"]
)
def test_a_number_that_no_machine_holds_is_bad_params_that_name_the_field(number: str) -> None:
    for name in ("temperature", "seed", "stop"):
        answer = error(opened(), f'{{"type":"session.create","id":"1","params":{{"{name}":{number}}}}}')
        assert (answer["id"], answer["code"], answer["field"]) == ("1", "bad_params", f"params.{name}")
        assert len(answer["detail"]) < 300
    assert error(opened(), f'{{"type":"session.list","id":"1","limit":{number}}}')["field"] == "limit"
    ignored = receive(opened(), f'{{"type":"session.list","id":"1","surprise":{number}}}')
    assert isinstance(ignored, Requested), "what is ignored may be anything"


def test_a_frame_that_is_nested_too_deeply_is_told_so() -> None:
    for deep in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000):
        answer = error(opened(), f'{{"type":"session.list","id":"1","surprise":{deep}}}')
        assert (answer["code"], "nested too deeply" in answer["detail"]) == ("bad_frame", True)


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    output = receive(opened(), '{"type":"session.list","id":"1","type":"session.create","id":"2"}')
    assert (type(output.request).__name__, output.request.id) == ("SessionCreate", "2")


def test_params_are_kept_sparse_and_a_null_is_an_absence() -> None:
    params = {"top_k": 3, "seed": None, "unknown": "x"}
    output = receive(opened(), {"type": "session.create", "id": "1", "params": params, "title": None})
    assert output.request.params == {"top_k": 3}
    assert output.request.title is None


def test_an_update_tells_a_cleared_system_prompt_from_an_untouched_one() -> None:
    update = {"type": "session.update", "id": "1", "session": "s"}
    assert receive(opened(), {**update, "system": None}).request.system is None
    assert receive(opened(), {**update, "title": "t"}).request.system is msgspec.UNSET
    assert error(opened(), update)["code"] == "bad_frame"


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        "[]",
        "null",
        '"hello"',
        "[" * 100_000,
        '{"type":"session.list","id":"1","limit":NaN}',
        '{"type":"session.list","id":"1","limit":Infinity}',
        '{"type":"session.list","id":"1","limit":-Infinity}',
        '{"type":"session.list","id":"1","query":"\\ud800"}',
        '{"type":"session.list","id":"1","query":"\\ud800","limit":1e400}',
        '{"type":"session.list","id":"1","limit":1e400,"pad":NaN}',
        '{"type":"session.list","id":"1","limit":1e400,"pad":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"type":"session.list","id":"1","query":"\\udfff!"}',
        '{"type":"session.list","id":"1","query":"\ud800"}',
        '{"id":"1"}',
        '{"type":7,"id":"1"}',
        '{"type":null}',
    ],
)
def test_what_is_no_frame_is_a_bad_frame_and_the_connection_goes_on(raw: str) -> None:
    protocol = opened()
    assert error(protocol, raw)["code"] == "bad_frame"
    assert isinstance(receive(protocol, {"type": "session.list", "id": "1"}), Requested)


def test_a_binary_frame_is_a_bad_frame() -> None:
    protocol = opened()
    (output,) = protocol.receive_binary(2.0)
    assert isinstance(output, Send)
    assert json.loads(output.text)["code"] == "bad_frame"
    assert not protocol.closed


def test_an_unknown_type_is_answered_with_its_id() -> None:
    answer = error(opened(), {"type": "session.explode", "id": "1"})
    assert (answer["code"], answer["id"]) == ("unknown_type", "1")
    assert "id" not in error(opened(), {"type": "session.explode"})


@pytest.mark.parametrize(("field", "limit"), [("title", 100), ("system", 500)])
def test_a_text_over_its_limit_in_utf8_is_too_large(field: str, limit: int) -> None:
    create = {"type": "session.create", "id": "1"}
    assert isinstance(receive(opened(), {**create, field: "é" * (limit // 2)}), Requested)
    answer = error(opened(), {**create, field: "é" * (limit // 2) + "x"})
    assert (answer["code"], answer["field"]) == ("too_large", field)
    assert str(limit + 1) in answer["detail"]
    assert str(limit) in answer["detail"]


def test_a_message_over_its_limit_is_too_large_with_the_request_named() -> None:
    answer = error(opened(), {"type": "message.send", "id": "1", "session": "s", "parent": None, "text": "x" * 1001})
    assert (answer["code"], answer["id"], answer["session"]) == ("too_large", "1", "s")


def test_a_frame_over_the_limit_closes_with_1009() -> None:
    for filler in ("x" * LIMITS.max_frame_bytes, "\U0001f600" * (LIMITS.max_frame_bytes // 4)):
        protocol = opened()
        output = receive(protocol, json.dumps({"type": "ping", "pad": filler}, ensure_ascii=False))
        assert isinstance(output, Close)
        assert output.code == CloseCode.FRAME_TOO_LARGE
    just = '{"type":"ping","pad":""}'
    assert receive(opened(), just[:-2] + "x" * (LIMITS.max_frame_bytes - len(just)) + '"}') == Send(PONG)


def test_text_is_taken_code_point_for_code_point() -> None:
    text = " \x00e\u0301\u00e9\u200d\U0001f468\r\n\t\ufeff"
    output = receive(opened(), {"type": "message.send", "id": "1", "session": "s", "parent": None, "text": text})
    assert output.request.text == text


scalars = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=5)

json_values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.sampled_from("ab"), scalars, max_size=2)

field_names = st.sampled_from(["id", "session", "message", "parent", "text", "params", "title", "limit", "query", "x"])


@given(
    st.sampled_from([*REQUESTS, "typing", "ping", "pong", "hello", "nonsense"]),
    st.dictionaries(field_names, json_values, max_size=4),
    st.booleans(),
)
def test_whatever_an_object_holds_a_request_gets_one_answer_and_the_connection_goes_on(
    kind: str, fields: dict[str, Any], complete: bool
) -> None:
    protocol = opened()
    frame = {**(REQUESTS.get(kind, {}) if complete else {}), **fields, "type": kind}
    outputs = protocol.receive_text(json.dumps(frame), 2.0)
    assert not protocol.closed
    answers = {"pong": {0}, "typing": {0, 1}}.get(kind, {1})
    assert len(outputs) in answers
    for output in outputs:
        assert isinstance(output, Send | Requested | Typed)
        if isinstance(output, Send) and output.text != PONG:
            answer = json.loads(output.text)
            assert answer["code"] in {"bad_frame", "bad_params", "unknown_type", "too_large"}


@given(st.text(max_size=50))
def test_no_text_breaks_it(text: str) -> None:
    protocol = opened()
    for output in protocol.receive_text(text, 2.0):
        assert isinstance(output, Send)

"""Prompts are what the model's own tokenizer and template would make of the conversation, put together turn by turn."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chatserve.chat.detokenizer import Detokenizer
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.template import ChatTemplate
from chatserve.errors import StartupError
from tests.chat.models import BYTE_LEVEL, CHATML, KINDS, SENTENCEPIECE, make_model_dir

WITH_TEMPLATE = [kind for kind in KINDS if kind != "none"]
TEXTS = ["Hello there", "two\n\nlines of   text", "日本語 👩‍👩‍👧‍👦 café", "x", "print('x')\n\tindented"]


def reference(encoder: PromptEncoder, path: Path) -> PreTrainedTokenizerFast:
    config = json.loads((path / "tokenizer_config.json").read_text())
    names = {k: config[k] for k in ("bos_token", "eos_token") if k in config}
    return PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **names)


def whole(encoder: PromptEncoder, path: Path, messages: list[dict[str, str]]) -> tuple[int, ...]:
    """All at once, by transformers."""
    tokenizer = reference(encoder, path)
    text = encoder.template.render(messages, add_generation_prompt=True)
    tokenizer.chat_template = encoder.template.source
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def as_read(kind: str, text: str) -> str:
    """SentencePiece has one piece for a space and for the character that it writes it with."""
    return text.replace("▁", " ") if kind in SENTENCEPIECE else text


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user", "assistant"]
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("kind", WITH_TEMPLATE)
@pytest.mark.parametrize("text", TEXTS)
def test_a_first_turn_equals_the_whole_string_tokenised(
    encoders: dict[str, PromptEncoder], kind: str, text: str
) -> None:
    encoder = encoders[kind]
    text = text.strip()
    assert encoder.encode_root(None, text) == whole(encoder, encoders.root / kind, turns(text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_is_refused_exactly_where_no_conversation_can_begin(
    encoders: dict[str, PromptEncoder], kind: str
) -> None:
    encoder = encoders[kind]
    shortest = min(len(encoder.encode_root(system, text)) for system in (None, "", "x") for text in ("", "a", *TEXTS))
    for context_tokens in (1, shortest):
        with pytest.raises(
            StartupError, match=f"--context-tokens must be at least {shortest + 1}, not {context_tokens}"
        ):
            encoder.check_context(context_tokens)
    encoder.check_context(shortest + 1)


@pytest.mark.parametrize("kind", ["chatml", "llama3", "phi3", "qwen3", "llama2"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_system_prompt_is_the_templates(encoders: dict[str, PromptEncoder], kind: str, text: str) -> None:
    encoder = encoders[kind]
    assert encoder.encode_root(text, "Hi") == whole(encoder, encoders.root / kind, turns("Hi", system=text))


@pytest.mark.parametrize("kind", ["gemma"])
def test_without_a_system_role_the_prompt_stands_before_the_first_message(
    encoders: dict[str, PromptEncoder], kind: str
) -> None:
    encoder = encoders[kind]
    joined = turns("Be brief.\n\nHi")
    assert encoder.encode_root("Be brief.", "Hi") == whole(encoder, encoders.root / kind, joined)


@pytest.mark.parametrize("kind", WITH_TEMPLATE)
@pytest.mark.parametrize("text", TEXTS)
def test_turns_put_together_equal_the_whole_conversation(
    encoders: dict[str, PromptEncoder], kind: str, text: str
) -> None:
    encoder = encoders[kind]
    text = text.strip()
    pieces = encoder.encode_root(None, "Hi") + encoder.encode_answer(text) + encoder.encode_turn(text)
    together = whole(encoder, encoders.root / kind, turns("Hi", text, text))
    assert encoder.tokenizer.decode(pieces) == encoder.tokenizer.decode(together)
    assert pieces == together


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_types_is_text_even_if_it_looks_like_control(encoders: dict[str, PromptEncoder], kind: str) -> None:
    encoder = encoders[kind]
    control = encoder.tokenizer.control_ids
    forged = " x ".join(encoder.tokenizer._control)
    plain = [i for i in encoder.encode_turn("y") if i in control]
    for encode in (encoder.encode_turn, lambda text: encoder.encode_root("s", text)):
        assert [i for i in encode(forged) if i in control] == [i for i in encode("y") if i in control]
    assert plain == [i for i in encoder.encode_turn(forged) if i in control]
    assert forged in encoder.tokenizer.decode(encoder.encode_turn(forged))
    assert control.isdisjoint(encoder.encode_continuation(forged))
    assert control.isdisjoint(encoder.encode_answer(forged))
    forged_system = encoder.encode_root(forged, "y")
    assert [i for i in forged_system if i in control] == [i for i in encoder.encode_root("s", "y") if i in control]


def test_control_tokens_that_the_vocabulary_holds_as_plain_pieces_are_cut(tmp_path: Path) -> None:
    """A unigram model finds `</s>` as a piece of its own; a person's must not become it."""
    spec = json.loads((make_model_dir(tmp_path, "mistral") / "tokenizer.json").read_text())
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["[INST]", 0.0], ["[/INST]", 0.0]]
    pieces += [[char, -10.0] for char in "</s>abc▁INST[]"]
    spec["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["id"] < 5]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    encoder = PromptEncoder(tmp_path)
    ids = encoder.encode_continuation("a</s>b</s></s>")
    assert encoder.tokenizer.control_ids.isdisjoint(ids)
    assert encoder.tokenizer.decode(ids) == "a</s>b</s></s>"


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_text_that_goes_on_is_encoded_byte_for_byte(encoders: dict[str, PromptEncoder], kind: str, text: str) -> None:
    encoder = encoders[kind]
    ids = encoder.encode_continuation(text)
    assert encoder.tokenizer.decode(ids) == as_read(kind, text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_a_users_text_is_in_the_prompt_as_it_was_typed(
    encoders: dict[str, PromptEncoder], kind: str, text: str
) -> None:
    encoder = encoders[kind]
    assert as_read(kind, text).strip() in encoder.tokenizer.decode(encoder.encode_root("system", text))
    assert as_read(kind, text).strip() in encoder.tokenizer.decode(encoder.encode_turn(text))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hello there.", " spaced", "日本"])
def test_an_answer_from_elsewhere_reads_back_as_its_text(
    encoders: dict[str, PromptEncoder], kind: str, text: str
) -> None:
    encoder = encoders[kind]
    detokenizer = Detokenizer(encoder.tokenizer.bytes_of, skip_prefix=encoder.answer_prefix)
    shown = "".join(detokenizer.feed(i) for i in encoder.encode_answer(text))
    # SentencePiece puts a space before a word that begins a stretch of text; the model reads it so in training too.
    assert shown in ({text, " " + text} if kind in SENTENCEPIECE else {text})


@pytest.mark.parametrize("kind", KINDS)
def test_stop_tokens_hold_the_templates_end_of_turn_and_none_is_text(
    encoders: dict[str, PromptEncoder], kind: str
) -> None:
    encoder = encoders[kind]
    end_of_turn = {
        "chatml": "<|im_end|>",
        "qwen3": "<|im_end|>",
        "llama3": "<|eot_id|>",
        "phi3": "<|end|>",
        "gemma": "<end_of_turn>",
        "llama2": "</s>",
        "mistral": "</s>",
        "none": "<|endoftext|>",
    }[kind]
    assert encoder.tokenizer.control_id(end_of_turn) in encoder.stop_token_ids
    detokenizer = Detokenizer(encoder.tokenizer.bytes_of)
    assert "".join(detokenizer.feed(i) for i in encoder.stop_token_ids) == ""


def test_stop_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    make_model_dir(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 99999]}))
    assert PromptEncoder(tmp_path).stop_token_ids == (0, 2)


# --- what users may share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_templates_own_text_is_shared_before_a_private_system_prompt(
    encoders: dict[str, PromptEncoder], kind: str
) -> None:
    encoder = encoders[kind]
    one = encoder.encode_root("my secret plan", "Hello")
    other = encoder.encode_root("another", "Hello")
    shared = encoder.num_shared_tokens("my secret plan", one)
    assert one[:shared] == other[:shared]
    assert "my" not in encoder.tokenizer.decode(one[:shared])
    assert encoder.num_shared_tokens("another", other) == shared


def test_an_operators_system_prompt_is_shared_up_to_the_users_text(tmp_path: Path) -> None:
    encoder = PromptEncoder(make_model_dir(tmp_path), operator_prompts=["Be brief."])
    ids = encoder.encode_root("Be brief.", "Hello")
    shared = encoder.num_shared_tokens("Be brief.", ids)
    assert encoder.tokenizer.decode(ids[:shared]).endswith("Be brief.\nuser\n")
    private = encoder.encode_root("Be brief. ", "Hello")
    assert encoder.num_shared_tokens("Be brief. ", private) < shared


@given(text=st.text(max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_shared_token_holds_any_of_a_users_text(encoders: dict[str, PromptEncoder], text: str) -> None:
    """A text's first characters may melt into one token with the template's last: that token is private."""
    encoder = encoders["chatml"]
    ids = encoder.encode_root(None, text)
    head = encoder.tokenizer.decode(ids[: encoder.num_shared_tokens(None, ids)])
    assert "\nuser\n".startswith(head[head.rindex("\nuser") :] if "\nuser" in head else "")


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_rewrites_earlier_turns_is_said_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_model_dir(tmp_path, kind)
    with caplog.at_level(logging.WARNING):
        encoder = PromptEncoder(tmp_path)
        encoder.encode_root("s", "x")
        encoder.encode_turn("y")
    said = [r for r in caplog.records if "renders earlier turns differently" in r.getMessage()]
    assert encoder.rewrites_history == (kind in {"qwen3", "mistral"})
    assert len(said) == int(encoder.rewrites_history)


def test_ids_depend_on_the_system_prompt_and_the_template(tmp_path: Path) -> None:
    one = PromptEncoder(make_model_dir(tmp_path / "a", "chatml"))
    other = PromptEncoder(make_model_dir(tmp_path / "b", "llama3"))
    assert len({one.encoded_for(None), one.encoded_for(""), one.encoded_for("x"), other.encoded_for(None)}) == 4
    assert one.encoded_for("x") == PromptEncoder(tmp_path / "a").encoded_for("x")


def test_a_model_without_a_template_gets_plain_lines(encoders: dict[str, PromptEncoder]) -> None:
    encoder = encoders["none"]
    assert encoder.tokenizer.decode(encoder.encode_root("Be brief.", "Hi")) == "Be brief.\n\nUser: Hi\nAssistant:"
    assert encoder.tokenizer.decode(encoder.encode_turn("More")) == "\nUser: More\nAssistant:"
    assert encoder.stop_strings == ("\nUser:",), "else the model writes the user's next line too"


@pytest.mark.parametrize("begins", [True, False])
def test_a_model_without_a_template_sees_first_what_its_tokenizer_puts_first(tmp_path: Path, begins: bool) -> None:
    make_model_dir(tmp_path, "gemma")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bos = tokenizer.token_to_id("<bos>")
    if begins:
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = PromptEncoder(tmp_path)
    assert (encoder.encode_root(None, "Hi")[0] == bos) == begins
    assert bos not in encoder.encode_turn("More")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endfor %}",
        "{% for m in messages %}{{ m.__class__.__base__ }}{{ m.content }}{% endfor %}",
        "{{ messages.append({'role': 'user'}) }}",
        "{% if",
        "{{ undefined_function() }}",
        "{{ raise_exception('no') }}",
        "always the same",
    ],
)
def test_templates_run_in_a_sandbox_and_bad_ones_are_named(source: str) -> None:
    with pytest.raises(StartupError, match=r"^the model's chat template .*use another model$"):
        ChatTemplate(source, {})


def test_a_template_never_sees_what_a_user_says(encoders: dict[str, PromptEncoder]) -> None:
    assert "7*7" in encoders["chatml"].tokenizer.decode(encoders["chatml"].encode_turn("{{ 7*7 }}"))


def test_a_template_that_fails_says_so_to_whoever_renders_it() -> None:
    template = ChatTemplate(CHATML, {})
    with pytest.raises(jinja2.TemplateError):
        template.render([{"role": "user"}], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", None, "is missing"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[1", "not valid JSON"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
    ],
)
def test_a_broken_model_directory_is_one_clear_line(tmp_path: Path, name: str, content: str | None, why: str) -> None:
    path = make_model_dir(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(StartupError, match=why) as raised:
        PromptEncoder(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", list(BYTE_LEVEL))
def test_the_bytes_of_tokens_add_up_to_what_the_tokenizer_decodes(
    encoders: dict[str, PromptEncoder], kind: str
) -> None:
    tokenizer = encoders[kind].tokenizer
    ids = list(range(tokenizer.vocab_size))
    for i in ids:
        alone = tokenizer._plain.decode([i], skip_special_tokens=True)
        assert tokenizer.decode([i]) == alone

"""A model's chat template, taken apart once into the constant text around what people say.

A template is a program from the internet that turns messages into one string. It is run in a sandbox, a few times at
load, with markers where contents go; the text between the markers is all that is kept. So a turn costs no rendering,
the pieces of a prompt concatenate, and a person's text never reaches the template's code. Knows strings only, no
tokens.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import msgspec

from chatserve.chat.tokenizer import Part
from chatserve.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FALLBACK_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant:' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""For models that bring no template: turns as lines of a script, `User: …` and `Assistant: …`."""

FALLBACK_STOP: Final = "\nUser:"
"""Where such an answer ends: a model that was never taught turns goes on with the other's lines too."""

_SYSTEM, _USER, _ANSWER, _USER2, _ANSWER2, _USER3 = (f"zq{name}qz" for name in ("sy", "ua", "aa", "ub", "ab", "uc"))
_MARKER: Final = re.compile(r"zq(?:sy|ua|aa|ub|ab|uc)qz")


class Skeleton(msgspec.Struct, frozen=True, kw_only=True):
    """The constant text around the contents. Each tuple has one literal more than it has contents."""

    root: tuple[str, str]
    """Around the first user message, without a system prompt of the session's."""
    root_with_system: tuple[str, str, str]
    """Before the system prompt, between it and the first user message, after that one."""
    turn: tuple[str, str]
    """Around a later user message: from the end of the answer before it to the beginning of the next."""
    answer_prefix: str
    """What the template puts between the opening of an answer and its text; a model writes it itself."""
    closing: str
    """What follows an answer's text."""
    trims: bool
    """The template strips white space around a user's text."""
    rewrites_history: bool
    """The template renders earlier turns differently once later ones follow (drops reasoning, moves the system prompt),
    which defeats every prefix cache. We keep what was said as it was said.
    """

    def root_parts(self, system: str | None, text: str) -> list[Part]:
        """Everything up to the beginning of the first answer."""
        text = self._trimmed(text)
        if system is None:
            return [Part(self.root[0], True), Part(text, False), Part(self.root[1], True)]
        before, between, after = self.root_with_system
        return [
            Part(before, True),
            Part(self._trimmed(system), False),
            Part(between, True),
            Part(text, False),
            Part(after, True),
        ]

    def turn_parts(self, text: str) -> list[Part]:
        """From the end of an answer to the beginning of the next."""
        return [Part(self.turn[0], True), Part(self._trimmed(text), False), Part(self.turn[1], True)]

    def _trimmed(self, text: str) -> str:
        return text.strip() if self.trims else text


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile; `special_tokens` are the variables (`bos_token`, …) that templates use.

        Raises:
            StartupError: it is not a template, or renders no conversation.
        """
        self.source = source
        self._variables = dict(special_tokens)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.skeleton = self._take_apart()
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template does not work ({error}): use another model") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt as one string.

        Raises:
            jinja2.TemplateError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except jinja2.TemplateError:
            raise
        except Exception as error:  # the template's own bugs surface as anything
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error

    def _take_apart(self) -> Skeleton:
        root = self._pieces([("user", _USER)], (_USER,))
        try:
            with_system = self._pieces([("system", _SYSTEM), ("user", _USER)], (_SYSTEM, _USER))
        except jinja2.TemplateError:  # a model without a system role reads it at the head of the first message
            with_system = (root[0], "\n\n", root[1])
        two_turns = [("user", _USER), ("assistant", _ANSWER), ("user", _USER2)]
        _, before_answer, turn_before, turn_after = self._pieces(two_turns, (_USER, _ANSWER, _USER2))
        # Without the opening of the next answer: what a finished answer looks like.
        finished = self._render(two_turns[:2], add_generation_prompt=False)
        closing = finished.partition(_ANSWER)[2]
        return Skeleton(
            root=(root[0], root[1]),
            root_with_system=(with_system[0], with_system[1], with_system[2]),
            turn=(turn_before, turn_after),
            answer_prefix=before_answer.removeprefix(root[1]) if before_answer.startswith(root[1]) else "",
            closing=closing,
            trims=self._render([("user", f" {_USER} ")], add_generation_prompt=True) == _USER.join(root),
            rewrites_history=self._rewrites_history(),
        )

    def _rewrites_history(self) -> bool:
        thinking = f"<think>\n{_ANSWER2}\n</think>\n\n{_ANSWER}"
        for answer in (_ANSWER, thinking):
            for head in ([], [("system", _SYSTEM)]):
                shorter = [*head, ("user", _USER), ("assistant", answer)]
                try:
                    asked = self._render(shorter[:-1], add_generation_prompt=True)
                    before = self._render(shorter, add_generation_prompt=False)
                    after = self._render([*shorter, ("user", _USER2)], add_generation_prompt=False)
                except jinja2.TemplateError:
                    continue
                if not (after.startswith(before) and after.startswith(asked) and answer in after):
                    return True
        return False

    def _pieces(self, messages: Sequence[tuple[str, str]], markers: tuple[str, ...]) -> tuple[str, ...]:
        rendered = self._render(messages, add_generation_prompt=True)
        found = _MARKER.findall(rendered)
        if tuple(found) != markers:
            raise jinja2.TemplateError(f"it does not keep the messages in order: {markers} became {found}")
        return tuple(_MARKER.split(rendered))

    def _render(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool) -> str:
        as_dicts = [{"role": role, "content": content} for role, content in messages]
        return self.render(as_dicts, add_generation_prompt=add_generation_prompt)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)

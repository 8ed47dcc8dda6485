"""What a person writes in the page: sent once and to the right chat, hinted, kept, and refused without loss."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, expect

from chatserve.config import Limits
from tests.server.harness import running_server
from tests.web.answers import Answers
from tests.web.conftest import Tab, until
from tests.web.scripts import BOTTOM, BOX, PRESS_ENTER, TOP, UNTIL_STILL

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

WATCH_INTERVALS = """
    window.intervals = new Set();
    const [begin, end] = [window.setInterval, window.clearInterval];
    window.setInterval = (...args) => { const id = begin(...args); intervals.add(id); return id; };
    window.clearInterval = (id) => { intervals.delete(id); end(id); };
"""


async def test_what_was_written_in_one_chat_is_never_sent_to_another(tab: Tab) -> None:
    await tab.ask("In the first")
    first = tab.session
    await tab.page.click("#new-chat")
    await tab.ask("In the second")
    second = tab.session
    await tab.page.goto("about:blank")
    await tab.open(f"#/c/{second}")
    await tab.write("for the second")
    already = len(tab.sent)
    # Somebody presses Enter in the very moment in which the address changes to a chat that has not been read.
    enter = f"addEventListener('hashchange', () => ({PRESS_ENTER})([box, false, 13]), {{ once: true }})"
    await tab.page.evaluate(f"([box, address]) => {{ {enter}; location.hash = address; }}", [BOX, f"#/c/{first}"])
    await expect(tab.page.locator(".markdown")).to_have_text("You said: In the first")
    await expect(tab.page.locator(BOX)).to_have_value("")
    await tab.ask("for the first")
    await tab.page.goto(f"{tab.server.url}/#/c/{second}")
    await expect(tab.page.locator(BOX)).to_have_value("for the second")
    await expect(tab.page.locator(".markdown")).to_have_text("You said: In the second")
    await tab.page.press(BOX, "Enter")
    await expect(tab.page.locator(".markdown").last).to_have_text("You said: for the second")
    sent = [frame for frame in tab.sent[already:] if frame["type"] == "message.send"]
    assert [(frame["session"], frame["text"]) for frame in sent] == [
        (first, "for the first"),
        (second, "for the second"),
    ]
    assert all(frame["parent"] is not None for frame in sent)


async def test_enter_pressed_twice_sends_once(tab: Tab) -> None:
    await tab.page.fill("#composer-text", "Only once")
    await tab.page.evaluate(
        f"(box) => {{ const press = {PRESS_ENTER}; press([box, false, 13]); press([box, false, 13]); }}", BOX
    )
    await tab.finished()
    assert await tab.texts() == ["Only once", "You said: Only once"]
    assert [frame["type"] for frame in tab.sent].count("message.send") == 1


async def test_typing_is_hinted_once_it_pauses(tab: Tab) -> None:
    await tab.ask("Hello")
    leaf = await tab.page.locator(".message.assistant").get_attribute("data-message")
    await tab.page.evaluate("""() => {
        const box = document.getElementById('composer-text');
        for (const letter of 'a draft') { box.value += letter; box.dispatchEvent(new Event('input')); }
    }""")
    await until(lambda: any(frame["type"] == "typing" for frame in tab.sent))
    hints = [frame for frame in tab.sent if frame["type"] == "typing"]
    assert hints == [{"type": "typing", "session": tab.session, "parent": leaf, "text": "a draft"}]


async def typed(tab: Tab, text: str) -> None:
    """Wait for the hint of this draft."""
    await until(lambda: any(frame["type"] == "typing" and frame["text"] == text for frame in tab.sent))


async def test_a_draft_that_is_given_up_or_left_behind_is_taken_back(tab: Tab) -> None:
    await tab.ask("Hello")
    await tab.page.fill(BOX, "a draft")
    await typed(tab, "a draft")
    await tab.page.fill(BOX, "")
    await typed(tab, "")
    session = tab.session
    await tab.page.fill(BOX, "another draft")
    await typed(tab, "another draft")
    await tab.page.click("#new-chat")
    await until(lambda: [frame["text"] for frame in tab.sent if frame["type"] == "typing"].count("") == 2)
    assert {frame["session"] for frame in tab.sent if frame["type"] == "typing"} == {session}
    await tab.page.goto(f"{tab.server.url}/#/c/{session}")
    await expect(tab.page.locator(BOX)).to_have_value("another draft")
    await tab.page.press(BOX, "Enter")
    await expect(tab.page.locator(".message.assistant")).to_have_count(2)
    assert [frame for frame in tab.sent if frame["type"] == "typing"][-1]["text"] == "", (
        "what was sent is not taken back"
    )


async def test_an_edit_is_hinted_as_what_follows_the_message_before_it(tab: Tab) -> None:
    await tab.ask("First")
    answer = await tab.page.locator(".message.assistant").get_attribute("data-message")
    await tab.ask("Second")
    await tab.act("user", "edit")
    await tab.page.fill(".edit-text", "Third")
    await typed(tab, "Third")
    hint = next(frame for frame in reversed(tab.sent) if frame["type"] == "typing")
    assert hint["parent"] == answer
    await tab.page.press(".edit-text", "Escape")
    await typed(tab, "")


async def test_what_was_typed_during_an_answer_is_hinted_at_its_end(tab: Tab) -> None:
    tab.server.engine.pace.allow(5)
    await tab.send("A question")
    await expect(tab.page.locator(".message.generating")).to_have_count(1)
    await tab.page.fill(BOX, "the next one")
    await typed(tab, "the next one")
    first = len([frame for frame in tab.sent if frame["type"] == "typing"])
    tab.server.engine.pace.release()
    await tab.finished()
    await until(lambda: len([frame for frame in tab.sent if frame["type"] == "typing"]) > first)


@asynccontextmanager
async def refused_for_now(browser: Browser, answers: Answers) -> AsyncIterator[Tab]:
    """A user who may have one answer at once has asked for "The second" while the first is being written."""
    limits = Limits(max_generations_per_user=1)
    async with running_server(script=answers, num_blocks=512, limits=limits) as server:
        context = await browser.new_context()
        tab = Tab(await context.new_page(), server)
        await tab.page.add_init_script(WATCH_INTERVALS)
        await tab.open()
        server.engine.pace.allow(3)
        await tab.send("The first")
        await expect(tab.page.locator(".message.generating")).to_have_count(1)
        await tab.page.click("#new-chat")
        await expect(tab.page.locator(".message")).to_have_count(0)
        await tab.send("The second")
        yield tab
        tab.check()
        await context.close()


async def test_a_refusal_for_now_is_counted_down_and_tried_again(browser: Browser, answers: Answers) -> None:
    async with refused_for_now(browser, answers) as tab:
        notice = tab.page.locator(".notice")
        await expect(notice.locator(".notice-text")).to_contain_text("at most 1 at once")
        await expect(notice.locator("button", has_text="Trying again in")).to_be_visible()
        await expect(tab.page.locator(BOX)).to_have_value("The second")
        tab.server.engine.pace.release()
        await expect(tab.page.locator(".bubble")).to_have_text("The second")
        await tab.finished()
        await expect(notice).to_have_count(0)
        await expect(tab.page.locator(BOX)).to_have_value("")


async def test_a_countdown_that_is_dismissed_sends_nothing(browser: Browser, answers: Answers) -> None:
    async with refused_for_now(browser, answers) as tab:
        await expect(tab.page.locator(".notice button", has_text="Trying again in")).to_be_visible()
        await tab.page.wait_for_function("() => intervals.size === 1")
        await tab.page.locator(".notice [aria-label=Dismiss]").click()
        await expect(tab.page.locator(".notice")).to_have_count(0)
        assert await tab.page.evaluate("() => intervals.size") == 0
        await expect(tab.page.locator(BOX)).to_have_value("The second")
        tab.server.engine.pace.release()


async def test_enter_that_ends_a_composition_does_not_send(tab: Tab) -> None:
    compositions = ((True, 13), (True, 229), (False, 229))
    await tab.page.fill(BOX, "にほん")
    for composing, key_code in compositions:
        assert await tab.page.evaluate(PRESS_ENTER, [BOX, composing, key_code])
    await tab.page.press(BOX, "Shift+Enter")
    await expect(tab.page.locator(BOX)).to_have_value("にほん\n")
    await expect(tab.page.locator(".message")).to_have_count(0)
    await tab.page.press(BOX, "Enter")
    await tab.finished()
    await tab.act("user", "edit")
    for composing, key_code in compositions:
        assert await tab.page.evaluate(PRESS_ENTER, [".edit-text", composing, key_code])
    await expect(tab.page.locator(".edit-text")).to_be_editable()
    await tab.page.press(".edit-text", "Escape")
    await expect(tab.page.locator(".bubble")).to_have_count(1)
    sent = [frame["type"] for frame in tab.sent]
    assert (sent.count("message.send"), sent.count("message.edit")) == (1, 0)


async def test_writing_several_lines_leaves_the_reader_at_the_bottom(tab: Tab, answers: Answers) -> None:
    answers.say(lambda _question: "Paragraph.\n\n" * 40)
    await tab.ask("Write a long text")
    for letter in "one\ntwo\nthree":
        await tab.page.press("#composer-text", "Shift+Enter" if letter == "\n" else letter)
    await tab.page.evaluate(UNTIL_STILL)
    await expect(tab.page.locator("#jump")).to_be_hidden()
    assert abs(await tab.page.evaluate(TOP) - await tab.page.evaluate(BOTTOM)) <= 1


async def test_editing_keeps_the_box_in_view_and_its_answer_too(tab: Tab, answers: Answers) -> None:
    answers.say(lambda _question: "Paragraph.\n\n" * 8)
    question = "Line\n" * 12
    await tab.ask(question)
    edit = tab.page.locator(".message.user [data-action=edit]")
    await tab.page.locator(".message.user .bubble").hover()
    await edit.click()
    await tab.page.evaluate(UNTIL_STILL)
    await expect(tab.page.locator(".edit-text")).to_be_in_viewport(ratio=0.9)
    await tab.page.fill(".edit-text", "Short")
    answers.say(lambda _question: "Short too.")
    await tab.page.press(".edit-text", "Enter")
    await expect(tab.page.locator(".markdown")).to_have_text("Short too.")
    await tab.finished()
    await expect(tab.page.locator("#jump")).to_be_hidden()


async def test_an_oversize_text_stays_in_the_box_and_the_socket_goes_on(tab: Tab) -> None:
    await tab.ask("Before")
    large = "0123456789abcdef" * (300 * 64)
    await tab.page.fill("#composer-text", large)
    await tab.page.press("#composer-text", "Enter")
    await expect(tab.page.locator(".notice")).to_have_text(re.compile(r"^Not sent\. Text is .*262144.*\.$"))
    assert await tab.page.input_value("#composer-text") == large
    await expect(tab.page.locator("#banner")).to_be_hidden()
    await tab.page.get_by_role("button", name="Dismiss").click()
    await expect(tab.page.locator(".notice")).to_have_count(0)
    await tab.ask("After")
    assert (await tab.texts())[-1] == "You said: After"


async def test_drafts_are_kept_for_each_chat(tab: Tab) -> None:
    await tab.ask("One")
    first = tab.session
    await tab.page.fill("#composer-text", "not sent yet")
    await tab.page.locator("#new-chat").click()
    await expect(tab.page.locator("#composer-text")).to_have_value("")
    await tab.page.fill("#composer-text", "a new idea")
    await tab.page.goto(f"{tab.server.url}/#/c/{first}")
    await expect(tab.page.locator("#composer-text")).to_have_value("not sent yet")
    await tab.page.reload()
    await expect(tab.page.locator("#composer-text")).to_have_value("not sent yet")


HOLD_TURNS = """() => {
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (frame) {
    if (!frame.includes('"message.send"')) return send.call(this, frame);
    window.letGo = () => { WebSocket.prototype.send = send; send.call(this, frame); };
  };
}"""


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_draft_that_reads_like_what_another_chat_sends_stays_its_own(tab: Tab, is_accepted: bool) -> None:
    box = tab.page.locator("#composer-text")
    await tab.ask("One")
    first = tab.session
    await tab.page.locator("#new-chat").click()
    await tab.ask("Two")
    second = tab.session
    await box.fill("Same")
    await tab.page.goto(f"{tab.server.url}/#/c/{first}")
    await expect(box).to_have_value("")
    await box.fill("Same")
    await tab.page.evaluate(HOLD_TURNS)
    await box.press("Enter")
    await tab.page.goto(f"{tab.server.url}/#/c/{second}")
    await expect(box).to_have_value("Same")
    await expect(box).not_to_be_editable()
    if not is_accepted:
        tab.server.engine.kill()
        await expect(tab.page.locator("#banner")).to_contain_text("without its engine")
    await tab.page.evaluate("letGo()")
    await expect(box).to_be_editable()
    if not is_accepted:
        await tab.page.get_by_role("button", name="Trying again").click()
        await expect(tab.page.locator(".notice")).to_have_count(0)
    await expect(box).to_have_value("Same")
    sent = [frame["session"] for frame in tab.sent if frame["type"] == "message.send"]
    assert sent == [first, second, first]

"""The page in Chromium against the real server: what a person sees, presses and loses nothing of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, expect

from chatserve.config import Limits
from chatserve.types import LOCAL_USER, SessionId
from tests.server.harness import Server, running_server
from tests.web.answers import Answers, in_pieces, make_pieces_dir
from tests.web.conftest import WATCH, Tab, until

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

SOME_MARKDOWN = """Some *words* first.

- one
- two

```python
print("hi")  # a comment
```

| a | b |
|---|--:|
| 1 | 2 |
"""
PAYLOADS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "[click](javascript:alert(1))",
    '<a href="javascript:alert(1)">x</a>',
    "![x](https://example.invalid/x.png)",
    '<iframe srcdoc="<script>alert(1)</script>"></iframe>',
    "<style>*{display:none}</style>",
    '"><img src=x onerror=alert(1)>',
    '```x"><img src=x onerror=alert(1)>\n<b>in code</b>\n```',
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "<b style=position:fixed>big</b>",
]
HARMFUL = """() => [
    ...document.querySelectorAll('#conversation :is(script, img, iframe, svg:not(.icon), style, form, math)'),
    ...document.querySelectorAll('#conversation :is([onerror], [onload], [onclick], [srcdoc], [style*=position])'),
    ...[...document.querySelectorAll('#conversation a[href]')].filter((a) => !/^(https?|mailto):/.test(a.href)),
].map((element) => element.outerHTML)"""


WATCH_BLOCKS = """() => {
    window.blocksLost = 0;
    new MutationObserver((records) => {
        for (const record of records) if (record.target.matches('.markdown')) blocksLost += record.removedNodes.length;
    }).observe(document.getElementById('conversation'), { childList: true, subtree: true });
}"""
UNTIL_LONG = """(length) => new Promise((resolve) => {
    const look = () => document.querySelector('.markdown code').textContent.length === length
        ? resolve() : requestAnimationFrame(look);
    look();
})"""
TOP = "document.getElementById('scroller').scrollTop"
BOTTOM = "(() => { const s = document.getElementById('scroller'); return s.scrollHeight - s.clientHeight; })()"
UNTIL_STILL = """() => new Promise((resolve) => {
    let [top, frames] = [-1, 0];
    const look = () => {
        const now = document.getElementById('scroller').scrollTop;
        frames = now === top ? frames + 1 : 0;
        top = now;
        if (frames > 10) resolve();
        else requestAnimationFrame(look);
    };
    look();
})"""
PRESS_ENTER = """([selector, composing, keyCode]) => document.querySelector(selector).dispatchEvent(new KeyboardEvent(
    'keydown', { key: 'Enter', code: 'Enter', bubbles: true, cancelable: true, isComposing: composing, keyCode }))"""
BOX = "#composer-text"
WATCH_INTERVALS = """
    window.intervals = new Set();
    const [begin, end] = [window.setInterval, window.clearInterval];
    window.setInterval = (...args) => { const id = begin(...args); intervals.add(id); return id; };
    window.clearInterval = (id) => { intervals.delete(id); end(id); };
"""


async def test_sends_and_shows_the_answer_as_markdown_with_a_receipt(tab: Tab, answers: Answers) -> None:
    answers.say(lambda _question: SOME_MARKDOWN)
    await tab.page.evaluate(WATCH_BLOCKS)
    await tab.ask("Hello there")
    assert await tab.page.evaluate("blocksLost") == 0, "a block, once there, stays"
    assert (await tab.texts())[0] == "Hello there"
    answer = tab.page.locator(".message.assistant .markdown")
    await expect(answer.locator("em")).to_have_text("words")
    await expect(answer.locator("li")).to_have_text(["one", "two"])
    await expect(answer.locator(".code-language")).to_have_text("python")
    await expect(answer.locator("code .hljs-string")).to_have_text('"hi"')
    await expect(answer.locator("td").last).to_have_attribute("align", "right")
    receipt = tab.page.locator(".receipt")
    for fact in ("cached", "swapped in", "computed", "out", "first token", "tokens/s"):
        await expect(receipt).to_contain_text(fact)
    await expect(tab.page.locator("#composer-text")).to_have_value("")
    assert await tab.page.title() == "Hello there · ChatServe"


async def test_a_second_question_is_answered_from_the_cache(tab: Tab) -> None:
    await tab.ask("The first question of this chat")
    await tab.ask("And the second one")
    cached = await tab.page.locator(".message.assistant").last.locator(".fact.cached b").inner_text()
    assert int(cached) > 50


async def test_regenerating_gives_a_second_version_and_one_can_go_back(tab: Tab, answers: Answers) -> None:
    await tab.ask("Once more")
    answers.say(lambda _question: "Another answer")
    await tab.act("assistant", "regenerate")
    await expect(tab.page.locator(".branch-position:visible")).to_have_text("2/2")
    await tab.finished()
    assert await tab.texts() == ["Once more", "Another answer"]
    await tab.act("assistant", "previous")
    await expect(tab.page.locator(".branch-position:visible")).to_have_text("1/2")
    assert await tab.texts() == ["Once more", "You said: Once more"]
    await expect(tab.page.locator(".message.assistant [data-action=next]")).to_be_focused()
    await tab.page.reload()
    await expect(tab.page.locator(".branch-position:visible")).to_have_text("1/2")
    assert await tab.texts() == ["Once more", "You said: Once more"]


async def test_editing_a_question_makes_a_branch_and_keeps_the_old_one(tab: Tab) -> None:
    await tab.ask("Old wording")
    await tab.act("user", "edit")
    await tab.page.fill(".edit-text", "New wording")
    await tab.page.press(".edit-text", "Enter")
    await expect(tab.page.locator(".message.user .branch-position:visible")).to_have_text("2/2")
    await tab.finished()
    assert await tab.texts() == ["New wording", "You said: New wording"]
    await tab.act("user", "previous")
    await expect(tab.page.locator(".bubble")).to_have_text("Old wording")
    assert await tab.texts() == ["Old wording", "You said: Old wording"]


async def test_a_fork_is_a_chat_of_its_own(tab: Tab) -> None:
    await tab.ask("Before the fork")
    original = tab.session
    await tab.act("assistant", "fork")
    await expect(tab.page).not_to_have_url(re.compile(f"{original}$"))
    await expect(tab.page.locator(".markdown")).to_have_text("You said: Before the fork")
    await tab.ask("After the fork")
    await tab.page.goto(f"{tab.server.url}/#/c/{original}")
    await expect(tab.page.locator(".bubble")).to_have_count(1)
    assert await tab.texts() == ["Before the fork", "You said: Before the fork"]


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


async def test_escape_stops_the_answer_and_it_can_be_continued(tab: Tab, answers: Answers) -> None:
    answers.say(lambda _question: "word " * 200)
    tab.server.engine.pace.allow(40)
    await tab.send("Write a lot")
    await expect(tab.page.locator(".markdown")).to_contain_text("word word")
    await tab.page.keyboard.press("Escape")
    tab.server.engine.pace.release()
    await expect(tab.page.locator(".message-state:visible")).to_have_text("Stopped.")
    stopped = (await tab.texts())[1]
    assert len(stopped) < 1000
    await tab.act("assistant", "continue")
    await expect(tab.page.locator(".markdown")).to_have_text(("word " * 200).strip())
    await tab.finished()


async def test_a_message_and_what_is_below_it_go_only_after_a_question(tab: Tab) -> None:
    await tab.ask("First")
    await tab.ask("Second")
    message = tab.page.locator(".message.assistant").first
    await message.hover()
    await message.locator("[data-action=delete]").click()
    await expect(tab.page.locator("dialog")).to_contain_text("All 2 messages below it")
    await tab.page.keyboard.press("Escape")
    await expect(tab.page.locator(".message")).to_have_count(4)
    await message.hover()
    await message.locator("[data-action=delete]").click()
    await tab.page.get_by_role("button", name="Delete 3 messages").click()
    await expect(tab.page.locator(".message")).to_have_count(1)
    await tab.page.get_by_role("button", name="Answer the last message").click()
    await tab.finished()
    assert await tab.texts() == ["First", "You said: First"]


async def test_ten_lost_connections_in_mid_answer_change_no_letter(tab: Tab, answers: Answers) -> None:
    text = "".join(f"{number} bottles, " for number in range(70))
    answers.say(lambda _question: text)
    pace, hub = tab.server.engine.pace, tab.server.context.hub
    pace.allow(60)
    await tab.send("Count")
    await expect(tab.page.locator(".markdown")).to_contain_text("bottles")
    gone: list[object] = []
    for num_steps in (40, 1, 90, 7, 60, 33, 2, 80, 15, 50):
        await until(lambda: any(socket.subscriptions for socket in hub.sockets() if socket not in gone))
        pace.allow(num_steps)
        gone.extend(hub.sockets())
        for socket in list(hub.sockets()):
            socket.outbox.end()
    pace.release()
    await tab.finished()
    assert (await tab.texts())[1] == text.strip()
    assert len([frame for frame in tab.sent if frame["type"] == "hello" and "resume" in frame]) >= 10
    assert len([frame for frame in tab.sent if frame["type"] == "session.open"]) <= 1, (
        "it resumed, and asked for nothing anew"
    )


async def test_a_restarted_server_finds_the_page_waiting(tab: Tab, answers: Answers) -> None:
    text = "word " * 100
    answers.say(lambda question: text if question == "Go" else "Yes")
    tab.server.engine.pace.allow(60)
    await tab.send("Go")
    await expect(tab.page.locator(".markdown")).to_contain_text("word")
    await tab.server.stop()
    await expect(tab.page.locator("#banner")).to_contain_text("Reconnecting")
    tab.server.engine.pace.release()
    await tab.server.start()
    await expect(tab.page.locator("#banner")).to_be_hidden(timeout=20_000)
    await expect(tab.page.locator(".message.generating")).to_have_count(0)
    kept = (await tab.texts())[1]
    assert text.startswith(kept)
    assert "word" in kept
    await tab.ask("Still there?")
    assert (await tab.texts())[1:] == [kept, "Still there?", "Yes"]


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


async def test_a_refusal_for_now_is_counted_down_and_tried_again(browser: Browser, answers: Answers) -> None:
    limits = Limits(max_generations_per_user=1)
    async with running_server(script=answers, num_blocks=512, limits=limits) as server:
        context = await browser.new_context()
        tab = Tab(await context.new_page(), server)
        await tab.open()
        server.engine.pace.allow(3)
        await tab.send("The first")
        await expect(tab.page.locator(".message.generating")).to_have_count(1)
        await tab.page.click("#new-chat")
        await expect(tab.page.locator(".message")).to_have_count(0)
        await tab.send("The second")
        notice = tab.page.locator(".notice")
        await expect(notice.locator(".notice-text")).to_contain_text("at most 1 at once")
        await expect(notice.locator("button", has_text="Trying again in")).to_be_visible()
        await expect(tab.page.locator(BOX)).to_have_value("The second")
        server.engine.pace.release()
        await expect(tab.page.locator(".bubble")).to_have_text("The second")
        await tab.finished()
        await expect(notice).to_have_count(0)
        await expect(tab.page.locator(BOX)).to_have_value("")
        tab.check()
        await context.close()


async def test_a_countdown_that_is_dismissed_sends_nothing(browser: Browser, answers: Answers) -> None:
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
        await expect(tab.page.locator(".notice button", has_text="Trying again in")).to_be_visible()
        await tab.page.wait_for_function("() => intervals.size === 1")
        await tab.page.locator(".notice [aria-label=Dismiss]").click()
        await expect(tab.page.locator(".notice")).to_have_count(0)
        assert await tab.page.evaluate("() => intervals.size") == 0
        await expect(tab.page.locator(BOX)).to_have_value("The second")
        server.engine.pace.release()
        tab.check()
        await context.close()


async def test_an_address_that_names_no_chat_says_so(tab: Tab) -> None:
    for address in ("#/c/nothing", "#/c/%zz"):
        await tab.page.goto("about:blank")
        await tab.open(address)
        await expect(tab.page.locator("#conversation")).to_contain_text("This chat is not here")


async def test_two_tabs_stay_in_step(tab: Tab, context: BrowserContext) -> None:
    await tab.ask("Shared")
    other = Tab(await context.new_page(), tab.server)
    await other.open(f"#/c/{tab.session}")
    await expect(other.page.locator(".markdown")).to_have_text("You said: Shared")
    await tab.ask("From the first tab")
    await expect(other.page.locator(".bubble").last).to_have_text("From the first tab")
    await other.finished()
    assert await other.texts() == await tab.texts()
    await other.act("assistant", "regenerate")
    await expect(tab.page.locator(".branch-position:visible")).to_have_text("2/2")
    current = other.page.locator(".session.current")
    await current.hover()
    await current.get_by_role("button", name="Rename").click()
    await other.page.keyboard.type("A better name")
    await other.page.keyboard.press("Enter")
    await expect(tab.page.locator("#title")).to_have_text("A better name")
    await expect(tab.page.locator(".session.current .session-link")).to_have_text("A better name")
    await current.hover()
    await current.get_by_role("button", name="Delete").click()
    await other.page.locator("dialog").get_by_role("button", name="Delete").click()
    await expect(tab.page.locator("#conversation")).to_contain_text("This chat is not here")
    await expect(other.page.locator("#title")).to_have_text("New chat")
    other.check()
    await other.page.close()


async def test_search_finds_titles_and_texts(tab: Tab) -> None:
    await tab.ask("A question about zebras")
    await tab.page.locator("#new-chat").click()
    await expect(tab.page.locator("#title")).to_have_text("New chat")
    await tab.ask("Something else entirely")
    await tab.page.keyboard.press("Control+k")
    await expect(tab.page.locator("#search")).to_be_focused()
    await tab.page.keyboard.type("ZEBRA")
    await expect(tab.page.locator(".session-link")).to_have_text(["A question about zebras"])
    await tab.page.fill("#search", "no such thing anywhere")
    await expect(tab.page.locator(".sessions-note")).to_contain_text("Nothing found")


async def test_no_script_runs_wherever_it_is_put(tab: Tab, tmp_path: Path) -> None:
    shown = tab.page.locator(".markdown .code-part, .markdown pre code").last

    async def check() -> None:
        await expect(shown).to_contain_text("<b>in code</b>")
        await expect(tab.page.locator(".bubble").first).to_contain_text(PAYLOADS[0])
        await tab.page.get_by_role("button", name="All branches").click()
        await expect(tab.page.locator("dialog.tree")).to_be_visible()
        assert await tab.page.evaluate(HARMFUL) == []
        await tab.page.keyboard.press("Escape")

    await tab.ask("Quote this: " + "\n\n".join(PAYLOADS))
    await check()
    current = tab.page.locator(".session.current")
    for payload in (PAYLOADS[0], PAYLOADS[8]):
        await current.hover()
        await current.get_by_role("button", name="Rename").click()
        await tab.page.locator(".rename").fill(payload)
        await tab.page.keyboard.press("Enter")
        await expect(tab.page.locator("#title")).to_have_text(payload)
    await tab.page.get_by_role("button", name="Chat settings").click()
    await tab.page.fill("#system", "\n".join(PAYLOADS))
    await tab.page.press("#system", "Tab")
    await tab.ask("\n\n".join(PAYLOADS))
    await expect(tab.page.locator("#system")).to_have_value("\n".join(PAYLOADS))
    await check()
    message = {"status": "done", "created_at": 0}
    messages = [
        {"message": "u", "parent": None, "role": "user", "text": "\n\n".join(PAYLOADS), **message},
        {"message": "a", "parent": "u", "role": "assistant", "text": "\n\n".join(PAYLOADS), **message},
    ]
    file = tmp_path / "<img src=x onerror=alert(1)>.json"
    file.write_text(json.dumps({"title": PAYLOADS[1], "messages": messages, "leaf": "a"}))
    await tab.page.set_input_files("input[type=file]", file)
    await expect(tab.page.locator("#title")).to_have_text(PAYLOADS[1])
    await check()


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


async def test_the_view_stays_where_the_reader_scrolled_to(tab: Tab, answers: Answers) -> None:
    answers.say(lambda _question: "".join(f"Paragraph {number}.\n\n- item\n\n" for number in range(70)))
    pace = tab.server.engine.pace
    pace.allow(700)
    await tab.send("Write a long text")
    await expect(tab.page.locator(".markdown")).to_contain_text("Paragraph 20.")
    await tab.page.wait_for_function(f"Math.abs({TOP} - {BOTTOM}) <= 1")  # it follows while at the bottom
    await tab.page.mouse.move(700, 300)
    await tab.page.mouse.wheel(0, -400)
    await expect(tab.page.locator("#jump")).to_be_visible()
    await tab.page.evaluate(UNTIL_STILL)
    before, height = await tab.page.evaluate(TOP), await tab.page.evaluate(BOTTOM)
    pace.release()
    await tab.finished()
    assert await tab.page.evaluate(BOTTOM) > height + 1000
    assert await tab.page.evaluate(TOP) == before
    await tab.page.click("#jump")
    await expect(tab.page.locator("#jump")).to_be_hidden()
    assert abs(await tab.page.evaluate(TOP) - await tab.page.evaluate(BOTTOM)) <= 1


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


async def test_an_engine_that_is_away_is_said_once_and_plainly(tab: Tab) -> None:
    await tab.ask("Before")
    tab.server.engine.kill()
    await expect(tab.page.locator("#banner")).to_contain_text("without its engine")
    fade = "getComputedStyle(document.querySelector('.chat-head'), '::after').display"
    assert await tab.page.evaluate(fade) == "none", "the head's shadow does not fall on it"
    await tab.send("Now")
    await expect(tab.page.locator(".notice-text")).to_have_text("Not sent. The model is starting or restarting.")
    tab.server.engine.replace()
    await expect(tab.page.locator("#banner")).to_be_hidden()
    await tab.page.press(BOX, "Enter")
    await expect(tab.page.locator(".message.assistant")).to_have_count(2)
    await tab.finished()
    assert await tab.texts() == ["Before", "You said: Before", "Now", "You said: Now"]


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


async def test_settings_are_checked_here_and_kept_there(tab: Tab) -> None:
    await tab.ask("Hello")
    await tab.page.get_by_role("button", name="Chat settings").click()
    await tab.page.fill("#param-temperature", "7")
    await tab.page.press("#param-temperature", "Tab")
    await expect(tab.page.locator("#problem-temperature")).to_have_text("Temperature must be a number from 0 to 2")
    await tab.page.fill("#param-temperature", "0")
    await tab.page.press("#param-temperature", "Tab")
    await expect(tab.page.locator(".settings-status")).to_have_text("Saved")
    await tab.page.fill("#system", "Be brief.")
    await tab.page.press("#system", "Tab")
    await expect(tab.page.locator(".settings-status")).to_have_text("Saved")
    await tab.page.reload()
    await tab.page.get_by_role("button", name="Chat settings").click()
    await expect(tab.page.locator("#param-temperature")).to_have_value("0")
    await expect(tab.page.locator("#system")).to_have_value("Be brief.")
    await tab.page.fill("#param-temperature", "")
    await tab.page.press("#param-temperature", "Tab")
    await expect(tab.page.locator(".settings-status")).to_have_text("Saved")
    state = await tab.server.context.service.export(LOCAL_USER, SessionId(tab.session))
    assert state["params"] == {}
    assert state["system"] == "Be brief."


async def test_a_setting_changed_before_the_last_one_is_saved_loses_neither(tab: Tab) -> None:
    await tab.ask("Hello")
    await tab.page.get_by_role("button", name="Chat settings").click()
    await tab.page.evaluate("""() => {
        for (const [name, value] of [['temperature', '0'], ['top_k', '5'], ['min_p', '0.5']]) {
            const input = document.getElementById(`param-${name}`);
            input.value = value;
            input.dispatchEvent(new Event('change'));
        }
    }""")
    await until(lambda: len([frame for frame in tab.sent if frame["type"] == "session.update"]) == 3)
    await expect(tab.page.locator(".settings-status")).to_have_text("Saved")
    await tab.page.reload()
    await tab.page.get_by_role("button", name="Chat settings").click()
    for name, value in (("temperature", "0"), ("top_k", "5"), ("min_p", "0.5")):
        await expect(tab.page.locator(f"#param-{name}")).to_have_value(value)


async def test_settings_made_before_the_first_message_are_the_new_chats_alone(tab: Tab) -> None:
    await tab.ask("An older chat")
    older = tab.session
    await tab.page.locator("#new-chat").click()
    await expect(tab.page.locator("#title")).to_have_text("New chat")
    await tab.page.get_by_role("button", name="Chat settings").click()
    await tab.page.fill("#system", "Be kind.")
    await tab.page.fill("#param-top_k", "5")
    await tab.page.press("#param-top_k", "Tab")
    await tab.ask("A new chat")
    export = tab.server.context.service.export
    new = await export(LOCAL_USER, SessionId(tab.session))
    assert (new["system"], new["params"]) == ("Be kind.", {"top_k": 5})
    old = await export(LOCAL_USER, SessionId(older))
    assert (old["system"], old["params"]) == (None, {})
    await tab.page.locator("#new-chat").click()
    await expect(tab.page.locator("#system")).to_have_value("")


async def test_a_phone_needs_no_sideways_scrolling(browser: Browser, server: Server, answers: Answers) -> None:
    table = "| " + " | ".join("z" * 12) + " |\n|" + "---|" * 12
    answers.say(lambda _question: f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{table}\n")
    context = await browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    await context.add_init_script(WATCH)
    tab = Tab(await context.new_page(), server)
    await tab.open()
    await tab.ask("w" * 200)
    wide = "[document.documentElement, document.getElementById('scroller')].some((e) => e.scrollWidth > innerWidth)"
    assert not await tab.page.evaluate(wide)
    await tab.page.get_by_role("button", name="Show the list of chats").click()
    await expect(tab.page.locator(".session.current .session-link")).to_be_in_viewport()
    assert not await tab.page.evaluate(wide)
    await tab.page.keyboard.press("Escape")
    await expect(tab.page.get_by_role("button", name="Show the list of chats")).to_be_focused()
    await tab.page.get_by_role("button", name="Chat settings").click()
    assert not await tab.page.evaluate(wide)
    await tab.page.locator("#settings").get_by_role("button", name="Close the settings").click()
    await tab.act("assistant", "regenerate")
    await expect(tab.page.locator(".branch-position:visible")).to_have_text("2/2")
    await tab.finished()
    await tab.page.get_by_role("button", name="All branches").click()
    await expect(tab.page.locator(".tree-row")).to_have_count(3)
    ends = "new Set([...document.querySelectorAll('.tree-row')].map((row) => row.getBoundingClientRect().right)).size"
    assert await tab.page.evaluate(ends) == 1, "however deep, a row ends where the others do"
    await tab.page.keyboard.press("Escape")
    tab.check()
    await context.close()


async def write_100_kb_of_code(browser: Browser, directory: Path) -> float:
    """Stream it into the page and open it again there; the longest task of both, in ms."""
    lines = [f"    value_{number} = compute(value_{number}, {number})  # step {number}\n" for number in range(12)]
    pieces = [
        "```python\n",
        "".join(lines[:3]),
        "".join(lines[3:6]),
        "".join(lines[6:9]),
        lines[9],
        lines[10][:17],
        lines[10][17:],
        "```\n",
    ]
    order = [0, *([1, 2, 3, 4, 5, 6] * 210), 7]
    code = "".join(pieces[number] for number in order[1:-1])
    assert len(code) > 100_000
    model_dir = make_pieces_dir(directory, pieces)
    async with running_server(script=in_pieces(order), model_dir=model_dir, token_delay_s=0.002) as server:
        context = await browser.new_context(viewport={"width": 1280, "height": 800})
        await context.add_init_script(WATCH)
        tab = Tab(await context.new_page(), server)
        await tab.open()
        await tab.page.evaluate("""() => {
            window.kinds = new Set();
            window.elements = new Set();
            new MutationObserver(() => {
                for (const block of document.querySelectorAll('.markdown > *')) {
                    kinds.add(block.className);
                    elements.add(block);
                }
            }).observe(document.getElementById('conversation'), { childList: true, subtree: true });
            longTasks.length = 0;
        }""")
        await tab.send("Write a long program")
        await expect(tab.page.locator(".receipt")).to_be_visible(timeout=60_000)
        assert await tab.page.evaluate("document.querySelector('.markdown code').textContent") == code
        assert await tab.page.evaluate("[...kinds]") == ["code"], "the block was code from its first appearance on"
        assert await tab.page.evaluate("elements.size") == 1, "and was never drawn anew"
        written = await tab.page.evaluate("Math.max(0, ...longTasks)")
        await tab.page.reload()
        await expect(tab.page.locator(".markdown code")).to_be_visible()
        await tab.page.evaluate(UNTIL_LONG, len(code))
        opened = await tab.page.evaluate("Math.max(0, ...longTasks)")
        tab.check()
        await context.close()
    return max(written, opened)


async def test_100_kb_of_code_never_holds_the_page_up(browser: Browser, tmp_path: Path) -> None:
    # What else the machine does can only lengthen a task, so the best of three runs is the page's own.
    longest: list[float] = []
    while not longest or (min(longest) > 200 and len(longest) < 3):
        longest.append(await write_100_kb_of_code(browser, tmp_path / f"pieces{len(longest)}"))
    assert min(longest) <= 200, f"{longest} ms"


async def test_a_token_is_asked_for_kept_and_sent(browser: Browser) -> None:
    async with running_server(tokens={"correct-horse": "ann"}) as server:
        context = await browser.new_context()
        await context.add_init_script(WATCH)
        tab = Tab(await context.new_page(), server)
        await tab.page.goto(server.url)
        for token in ("wrong", "correct-horse"):
            await expect(tab.page.locator("dialog")).to_be_visible()
            await tab.page.fill("#token", token)
            await tab.page.keyboard.press("Enter")
            if token == "wrong":
                await expect(tab.page.locator("dialog")).to_contain_text("did not accept")
        await expect(tab.page.locator("#model")).not_to_be_empty()
        await tab.page.reload()
        await expect(tab.page.locator("#model")).not_to_be_empty()
        assert "correct-horse" not in tab.page.url
        tab.check()
        await context.close()

"""The page in Chromium against the real server: chats, their branches and their settings, as a person sees them."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Browser, BrowserContext, expect

from chatserve.types import LOCAL_USER, SessionId
from tests.server.harness import Server
from tests.web.answers import Answers
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

WATCH_BLOCKS = """() => {
    window.blocksLost = 0;
    new MutationObserver((records) => {
        for (const record of records) if (record.target.matches('.markdown')) blocksLost += record.removedNodes.length;
    }).observe(document.getElementById('conversation'), { childList: true, subtree: true });
}"""


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

"""What the page withstands: lost connections, dead servers, hostile texts, long answers and strangers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.server.harness import running_server
from tests.web.answers import Answers, in_pieces, make_pieces_dir
from tests.web.conftest import WATCH, Tab, until
from tests.web.scripts import BOTTOM, BOX, TOP, UNTIL_STILL

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

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

UNTIL_LONG = """(length) => new Promise((resolve) => {
    const look = () => document.querySelector('.markdown code').textContent.length === length
        ? resolve() : requestAnimationFrame(look);
    look();
})"""


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

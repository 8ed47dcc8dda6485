"""What tests run in the page itself."""

from __future__ import annotations

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

// @ts-check
/**
 * The one owner of the conversation's scroll position.
 *
 * The theory: either the reader is at the bottom, then the view follows what grows; or not, then nothing moves it. The
 * reader's own doings change which of the two holds, and content that shrinks until its bottom is in view. The browser's
 * scroll anchoring is off, since it would be a second owner. Nobody else sets `scrollTop`.
 */

const AT_BOTTOM_PX = 32;

export class Follower extends EventTarget {
  /**
   * @param {HTMLElement} scroller
   * @param {HTMLElement} content  what grows inside it
   */
  constructor(scroller, content) {
    super();
    this._scroller = scroller;
    this.following = true;
    this._lastTop = 0;
    scroller.addEventListener("scroll", () => this._scrolled(), { passive: true });
    // A turn of the wheel leaves the bottom at once, before the scroll event of it, which may come after a token.
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this._canScroll() && this._set(false), { passive: true });
    new ResizeObserver(() => this._settle()).observe(content);
    new ResizeObserver(() => this._settle()).observe(scroller);
  }

  /** Go to the bottom and stay there. */
  follow() {
    this._set(true);
    this._settle();
  }

  /** Stay here: the reader works on something in the view, and it is about to grow. */
  stay() {
    this._set(false);
  }

  /**
   * Change what stands above the view and keep what the reader sees in place.
   * @param {() => void} change
   */
  keepingPlace(change) {
    const before = this._scroller.scrollHeight;
    change();
    this._scroller.scrollTop += this._scroller.scrollHeight - before;
    this._lastTop = this._scroller.scrollTop;
  }

  _canScroll() {
    return this._scroller.scrollHeight > this._scroller.clientHeight;
  }

  _distance() {
    const { scrollTop, scrollHeight, clientHeight } = this._scroller;
    return scrollHeight - clientHeight - scrollTop;
  }

  _scrolled() {
    const top = this._scroller.scrollTop;
    // Content that shrank moves the view up too, but leaves it at the very bottom.
    if (top < this._lastTop && this._distance() > 1) this._set(false);
    else if (top > this._lastTop && this._distance() <= AT_BOTTOM_PX) this._set(true);
    this._lastTop = top;
  }

  _settle() {
    if (this.following) {
      this._scroller.scrollTop = this._scroller.scrollHeight;
      this._lastTop = this._scroller.scrollTop;
    } else if (this._distance() <= 1) this.following = true;
    this.dispatchEvent(new Event("change"));
  }

  /** @param {boolean} following */
  _set(following) {
    if (this.following === following) return;
    this.following = following;
    this.dispatchEvent(new Event("change"));
  }
}

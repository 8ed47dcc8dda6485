// @ts-check
/**
 * On a narrow screen the list of chats is a drawer: while it is out, the rest of the page is inert.
 *
 * Owns whether it is out, and where the focus goes.
 */

import { icon } from "./dom.js";

export class Drawer {
  /**
   * @param {{openButton: HTMLElement, closeButton: HTMLElement, scrim: HTMLElement, main: HTMLElement}} parts
   */
  constructor(parts) {
    this._parts = parts;
    parts.openButton.append(icon("menu"));
    parts.closeButton.append(icon("close"));
    parts.openButton.addEventListener("click", () => {
      this.open();
      parts.closeButton.focus();
    });
    parts.closeButton.addEventListener("click", () => this.dismiss());
    parts.scrim.addEventListener("click", () => this.dismiss());
  }

  get isOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  open() {
    this._set(true);
  }

  close() {
    this._set(false);
  }

  /**
   * Close it because the person wants to go back.
   * @returns {boolean} whether it was out
   */
  dismiss() {
    if (!this.isOpen) return false;
    this.close();
    this._parts.openButton.focus();
    return true;
  }

  /** @param {boolean} open */
  _set(open) {
    document.body.classList.toggle("sidebar-open", open);
    this._parts.main.inert = open;
    this._parts.scrim.hidden = !open;
  }
}

// @ts-check
/**
 * Questions that stop everything else: confirm, and the access token.
 *
 * Each returns a promise and puts the focus back where it was (the browser does, for a modal dialog).
 */

import { h, isComposing } from "./dom.js";

/**
 * @param {HTMLDialogElement} dialog
 * @returns {Promise<string>} the value of the button that closed it; "" on Esc
 */
function ask(dialog) {
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    // A form with method=dialog would be a form submission, which the page's policy forbids.
    dialog.showModal();
  });
}

/**
 * @param {{title: string, text: string, action: string}} question
 * @returns {Promise<boolean>}
 */
export async function confirm({ title, text, action }) {
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "dialog-title" },
    h("h2", { id: "dialog-title" }, title),
    h("p", {}, text),
    h("div", { class: "dialog-buttons" },
      h("button", { type: "button", class: "button", autofocus: true, onclick: () => dialog.close("") }, "Cancel"),
      h("button", { type: "button", class: "button danger", onclick: () => dialog.close("yes") }, action)));
  return (await ask(dialog)) === "yes";
}

/**
 * @param {boolean} refused  a token was sent and not accepted
 * @returns {Promise<{token: string, remember: boolean} | null>}
 */
export async function askToken(refused) {
  const token = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", autofocus: true });
  const remember = h("input", { type: "checkbox", id: "remember" });
  const enter = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !isComposing(event)) {
      event.preventDefault();
      dialog.close("yes");
    }
  };
  token.addEventListener("keydown", enter);
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "dialog-title" },
    h("h2", { id: "dialog-title" }, "Access token"),
    h("p", {}, refused ? "The server did not accept this token." : "This server asks for a token. Whoever runs it can give you one."),
    h("label", { for: "token" }, "Token"), token,
    h("label", { class: "check" }, remember, " Remember it in this browser"),
    h("div", { class: "dialog-buttons" },
      h("button", { type: "button", class: "button", onclick: () => dialog.close("") }, "Not now"),
      h("button", { type: "button", class: "button primary", onclick: () => dialog.close("yes") }, "Connect")));
  const answer = await ask(dialog);
  return answer === "yes" && token.value.trim() !== "" ? { token: token.value.trim(), remember: remember.checked } : null;
}

// @ts-check
/**
 * The button that imports chats from a file.
 */

import { importSessions } from "../transfer.js";
import { announce, h, icon } from "./dom.js";

/**
 * @param {HTMLElement} button
 * @param {{token: () => string | null, imported: (sessions: string[]) => void, failed: (error: Error) => void}} handlers
 */
export function installImporter(button, handlers) {
  const input = h("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "File to import" });
  button.append(icon("upload"));
  button.setAttribute("aria-label", "Import chats");
  button.title = "Import chats (an export of ChatServe, or ChatGPT's conversations.json)";
  button.after(input);
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    const file = input.files?.[0];
    if (file === undefined) return;
    try {
      const sessions = await importSessions(file, handlers.token());
      announce(sessions.length === 1 ? "Imported a chat" : `Imported ${sessions.length} chats`);
      handlers.imported(sessions);
    } catch (error) {
      handlers.failed(/** @type {Error} */ (error));
    } finally {
      input.value = "";
    }
  });
}

// @ts-check
/**
 * Export and import of chats over HTTP.
 *
 * Owns no state. Failures are exceptions whose message is a sentence for a person.
 */

/** @param {string | null} token @returns {Record<string, string>} */
const authorization = (token) => (token ? { Authorization: `Bearer ${token}` } : {});

/** @param {Response} response */
async function explain(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.detail ?? body?.error?.detail ?? body?.error?.message ?? `The server answered ${response.status}.`);
}

/**
 * Offer a session's export as a file.
 * @param {string} session
 * @param {string} title
 * @param {string | null} token
 */
export async function exportSession(session, title, token) {
  const response = await fetch(`/api/sessions/${encodeURIComponent(session)}/export`, { headers: authorization(token) });
  if (!response.ok) throw await explain(response);
  const url = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = `${title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "chat"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/**
 * @param {File} file  an export of ours, or ChatGPT's conversations.json
 * @param {string | null} token
 * @returns {Promise<string[]>} the new sessions
 */
export async function importSessions(file, token) {
  const headers = { "Content-Type": "application/json", ...authorization(token) };
  const response = await fetch("/api/sessions/import", { method: "POST", headers, body: file });
  if (!response.ok) throw await explain(response);
  return (await response.json()).sessions;
}

// @ts-check
/**
 * Making elements without HTML text, icons, and the two things every view needs: announcing and copying.
 *
 * Knows nothing of the store. Nothing here takes markup, so nothing here can be injected into.
 */

const SVG = "http://www.w3.org/2000/svg";

/** Paths on a 24 by 24 grid, drawn as strokes. */
const ICONS = {
  plus: "M12 5v14M5 12h14",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  fork: "M6 4v7a4 4 0 0 0 4 4h8M18 15l-4-4M18 15l-4 4M6 11v9",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  forward: "M5 5l8 7-8 7zM16 5v14",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 8h8M18 8h2M4 16h2M12 16h8M15 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6zM9 19a3 3 0 1 0 0-6 3 3 0 0 0 0 6z",
  tree: "M6 5v14M6 9h8M6 17h8M14 7h5v4h-5zM14 15h5v4h-5z",
  search: "M10.5 17a6.5 6.5 0 1 0 0-13 6.5 6.5 0 0 0 0 13zM15.5 15.5L20 20",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6L7 7M17 17l1.4 1.4M18.4 5.6L17 7M7 17l-1.4 1.4",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  auto: "M12 4a8 8 0 0 0 0 16zM12 4a8 8 0 0 1 0 16z",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
};

/** @typedef {keyof typeof ICONS} IconName */
/** @typedef {Node | string | null | undefined | false} Child */

/**
 * An element with attributes, listeners (`onclick` and the like) and children.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes  null, undefined and false leave one out; true gives an empty one
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else setAttribute(element, name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map((child) => /** @type {Node | string} */ (child)));
  return element;
}

/**
 * @param {Element} element
 * @param {string} name
 * @param {any} value
 */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

/** @param {IconName} name */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/**
 * A button that shows an icon only; its label is for screen readers and the tooltip.
 * @param {IconName} name
 * @param {string} label
 * @param {(event: MouseEvent) => void} onclick
 * @param {Record<string, any>} [attributes]
 */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/**
 * @param {string} label
 * @param {() => string} text  asked for at the click
 */
export function copyButton(label, text) {
  /** @type {any} */
  let timer = null;
  const button = iconButton("copy", label, async () => {
    const copied = await copy(text());
    announce(copied ? "Copied" : "Copying failed");
    button.replaceChildren(icon(copied ? "check" : "close"));
    clearTimeout(timer);
    timer = setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/**
 * @param {string} text
 * @returns {Promise<boolean>}
 */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // No clipboard on a page that came by plain HTTP: the old way still works there.
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    const field = h("textarea", { class: "visually-hidden", readonly: true });
    field.value = text;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused?.focus({ preventScroll: true });
    return copied;
  }
}

/**
 * Whether a key belongs to an input method (Japanese, Chinese, Korean): such an Enter or Esc is not ours. Safari ends a
 * composition before its Enter arrives; the key code 229 still tells.
 * @param {KeyboardEvent} event
 */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

/**
 * Tell a screen reader, politely.
 * @param {string} text
 */
export function announce(text) {
  const region = document.getElementById("announcer");
  if (region !== null) region.textContent = text;
}

/** @param {number} value */
export function count(value) {
  return value.toLocaleString("en");
}

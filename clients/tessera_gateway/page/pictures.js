// The pictures: dropped, pasted or chosen; one of them is shown, with the grid that the server cuts it by.

import { ask } from "./chat.js";
import { element } from "./results.js";
import { named } from "./words.js";

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const FINE = 64; // parts, from which on the grid is drawn in thin lines
const THUMBNAIL = 96; // pixels of its longer side

let pictures = []; // {file, url}, in the order in which they are sent
let shown = null; // one of them
let asked = null; // the AbortController of the last question for the shown one's grid
let onRemoved = () => {};

/** The pictures' Files, in order. */
export const files = () => pictures.map(({ file }) => file);

/** ``removed`` is called when one is taken away. */
export function setUp(removed) {
  onRemoved = removed;
  at("file").addEventListener("change", () => {
    take([...at("file").files]);
    at("file").value = ""; // so that the same file may be chosen again
  });
  at("remove").addEventListener("click", remove);
  at("policy").addEventListener("change", drawGrid);
  at("show-grid").addEventListener("change", () => at("grid").toggleAttribute("hidden", !at("show-grid").checked));
  at("shown").addEventListener("error", () => {
    if (shown) at("dropped").textContent = `This browser cannot show ${shown.file.name}; the server may read it all the same.`;
  });
  document.addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return; // words, for the field that has the focus
    event.preventDefault();
    take([...event.clipboardData.files]);
  });
  // The whole window takes a drop, so that a near miss does not leave the page.
  let over = 0;
  const mark = (change) => at("drop").classList.toggle("over", (over = Math.max(0, over + change)) > 0);
  document.addEventListener("dragenter", () => mark(1));
  document.addEventListener("dragleave", () => mark(-1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(-over);
    const dropped = [...(event.dataTransfer?.files ?? [])];
    if (dropped.length) take(dropped);
    else say("That was no file. To ask about a picture of another page, save it first, or copy the picture itself and paste it here.");
  });
}

const say = (words) => (at("dropped").textContent = words);
const list = (names) => [names.slice(0, -1).join(", "), names.at(-1)].filter(Boolean).join(" and ");

/** Adds those of the files that are pictures, and says which are none. */
function take(found) {
  const others = found.filter((file) => !file.type.startsWith("image/")).map((file) => file.name);
  const taken = found.filter((file) => file.type.startsWith("image/"));
  const none = others.length === 1 ? "is no picture" : "are no pictures";
  const rest = taken.length ? `; ${list(taken.map((file) => file.name))} ${taken.length === 1 ? "was" : "were"} taken.` : ". The server reads JPEG, PNG and WebP.";
  say(others.length ? `${list(others)} ${none}${rest}` : "");
  if (!taken.length) return;
  const added = taken.map((file) => ({ file, url: URL.createObjectURL(file) }));
  pictures.push(...added);
  show(added[0]);
}

function remove() {
  const index = pictures.indexOf(shown);
  URL.revokeObjectURL(shown.url);
  pictures.splice(index, 1);
  say("");
  onRemoved();
  show(pictures[Math.min(index, pictures.length - 1)] ?? null);
  (shown ? at("remove") : at("file")).focus();
}

async function show(picture) {
  shown = picture;
  at("grid").replaceChildren();
  at("cut").textContent = "";
  at("figure").hidden = at("remove").hidden = !shown;
  at("empty").hidden = Boolean(shown);
  at("choose").textContent = shown ? "Add pictures" : "Choose pictures";
  if (shown) {
    at("shown").src = shown.url;
    at("shown").alt = `The picture you ask about: ${shown.file.name}`;
    at("remove").setAttribute("aria-label", `Remove ${shown.file.name}`);
  } else {
    at("shown").removeAttribute("src");
  }
  drawList();
  await drawGrid();
}

/** The row of small pictures, where there are several; each is a button that shows it. */
function drawList() {
  at("pictures").hidden = pictures.length < 2;
  const focused = at("pictures").contains(document.activeElement);
  at("pictures").replaceChildren(
    ...(pictures.length < 2 ? [] : pictures).map((picture, index) => {
      const [item, button, image] = ["li", "button", "img"].map((name) => element(name));
      button.type = "button";
      button.setAttribute("aria-label", `Show picture ${index + 1} of ${pictures.length}: ${picture.file.name}`);
      button.setAttribute("aria-pressed", picture === shown);
      image.src = picture.url;
      image.alt = "";
      button.append(image);
      button.addEventListener("click", () => show(picture));
      item.append(button);
      return item;
    }),
  );
  if (focused) at("pictures").querySelector('[aria-pressed="true"]')?.focus();
}

async function drawGrid() {
  asked?.abort();
  if (!shown) return;
  asked = new AbortController();
  const policy = at("policy").value;
  const which = pictures.length > 1 ? `${shown.file.name}: ` : "";
  try {
    const query = policy ? `?tile_policy=${encodeURIComponent(policy)}` : "";
    const response = await ask(`/tessera/tiles${query}`, { method: "POST", body: shown.file, signal: asked.signal });
    draw(await response.json(), which);
  } catch (error) {
    if (error.name === "AbortError") return;
    at("grid").replaceChildren();
    at("cut").textContent = `${which}How it is cut is not known: ${named(error.message, [shown.file.name])}`;
  }
}

/** What POST /tessera/tiles answers: the picture's own size, and the views that the model has of it. */
function draw({ width, height, tokens, unit, policies, views: [view, ...others] }, which) {
  const { rows, columns } = view;
  const lines = document.createElementNS(SVG, "path");
  const across = Array.from({ length: rows + 1 }, (_, row) => `M0 ${row}H${columns}`);
  const down = Array.from({ length: columns + 1 }, (_, column) => `M${column} 0V${rows}`);
  lines.setAttribute("d", [...across, ...down].join(""));
  at("grid").setAttribute("viewBox", `0 0 ${columns} ${rows}`);
  at("grid").classList.toggle("fine", rows * columns > FINE);
  at("grid").replaceChildren(lines);
  at("cut").textContent =
    `${which}${width} × ${height} pixels, resized to ${view.width} × ${view.height}: ${columns} × ${rows} ${unit}` +
    `${others.length ? " and a thumbnail of the whole" : ""}, ${tokens} tokens in all`;
  for (const option of at("policy").options) option.hidden = option.value && !policies.includes(option.value);
  at("policies").hidden = !policies.length;
}

/** The picture as a data: URL, as it was given. */
export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${blob.name} cannot be read any more: add it again.`));
    reader.readAsDataURL(blob);
  });
}

/** A small JPEG of the picture shown, as a data: URL; empty where the browser cannot show it. */
export function thumbnail() {
  const image = at("shown");
  if (!shown || !image.naturalWidth) return "";
  const scale = Math.min(1, THUMBNAIL / Math.max(image.naturalWidth, image.naturalHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.round(image.naturalHeight * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.7);
}

// The picture: dropped, pasted or chosen; shown with the grid that the server cuts it by.

import { ask } from "./chat.js";

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const FINE = 64; // parts, from which on the grid is drawn in thin lines
const THUMBNAIL = 96; // pixels of its longer side

let file = null;
let asked = null; // the AbortController of the last question for its grid

/** The picture chosen, a File, or null. */
export const picture = () => file;

export function setUp() {
  at("file").addEventListener("change", () => show(at("file").files[0]));
  at("remove").addEventListener("click", () => {
    show(null);
    at("file").focus();
  });
  at("policy").addEventListener("change", drawGrid);
  at("show-grid").addEventListener("change", () => at("grid").toggleAttribute("hidden", !at("show-grid").checked));
  document.addEventListener("paste", (event) => take(event, event.clipboardData));
  // The whole window takes a drop, so that a near miss does not leave the page.
  let over = 0;
  const mark = (change) => at("drop").classList.toggle("over", (over = Math.max(0, over + change)) > 0);
  document.addEventListener("dragenter", () => mark(1));
  document.addEventListener("dragleave", () => mark(-1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(-over);
    take(event, event.dataTransfer);
  });
}

function take(event, data) {
  const found = [...(data?.files ?? [])].find((each) => each.type.startsWith("image/"));
  if (!found) return;
  event.preventDefault();
  show(found);
}

async function show(chosen) {
  file = chosen ?? null;
  URL.revokeObjectURL(at("shown").src);
  at("grid").replaceChildren();
  at("cut").textContent = "";
  at("figure").hidden = !file;
  at("empty").hidden = Boolean(file);
  at("remove").hidden = !file;
  at("choose").textContent = file ? "Choose another" : "Choose a picture";
  if (file) {
    at("shown").src = URL.createObjectURL(file);
    at("shown").alt = `The picture you ask about: ${file.name}`;
  } else {
    at("file").value = "";
    at("shown").removeAttribute("src");
  }
  await drawGrid();
}

async function drawGrid() {
  asked?.abort();
  if (!file) return;
  asked = new AbortController();
  const policy = at("policy").value;
  try {
    const query = policy ? `?tile_policy=${encodeURIComponent(policy)}` : "";
    const response = await ask(`/tessera/tiles${query}`, { method: "POST", body: file, signal: asked.signal });
    draw(await response.json());
  } catch (error) {
    if (error.name === "AbortError") return;
    at("grid").replaceChildren();
    at("cut").textContent = `How it is cut is not known: ${error.message}`;
  }
}

/** What POST /tessera/tiles answers: the picture's own size, and the views that the model has of it. */
function draw({ width, height, tokens, unit, policies, views: [view, ...others] }) {
  const { rows, columns } = view;
  const lines = document.createElementNS(SVG, "path");
  const across = Array.from({ length: rows + 1 }, (_, row) => `M0 ${row}H${columns}`);
  const down = Array.from({ length: columns + 1 }, (_, column) => `M${column} 0V${rows}`);
  lines.setAttribute("d", [...across, ...down].join(""));
  at("grid").setAttribute("viewBox", `0 0 ${columns} ${rows}`);
  at("grid").classList.toggle("fine", rows * columns > FINE);
  at("grid").replaceChildren(lines);
  at("cut").textContent =
    `${width} × ${height} pixels, resized to ${view.width} × ${view.height}: ${columns} × ${rows} ${unit}` +
    `${others.length ? " and a thumbnail of the whole" : ""}, ${tokens} tokens in all`;
  for (const option of at("policy").options) option.hidden = option.value && !policies.includes(option.value);
  at("policies").hidden = !policies.length;
}

/** The picture as a data: URL, as it was given. */
export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A small JPEG of the picture shown, as a data: URL; empty where the browser cannot show it. */
export function thumbnail() {
  const shown = at("shown");
  if (!file || !shown.naturalWidth) return "";
  const scale = Math.min(1, THUMBNAIL / Math.max(shown.naturalWidth, shown.naturalHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(shown.naturalWidth * scale));
  canvas.height = Math.max(1, Math.round(shown.naturalHeight * scale));
  canvas.getContext("2d").drawImage(shown, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.7);
}

// The picture: dropped, pasted or chosen; shown with the tiles that the server cuts it into.

import { ask } from "./chat.js";

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const THUMBNAIL = 96; // pixels of its longer side

let file = null;
let asked = null; // the AbortController of the last question for tiles

/** The picture chosen, a File, or null. */
export const picture = () => file;

export function setUp() {
  at("file").addEventListener("change", () => show(at("file").files[0]));
  at("remove").addEventListener("click", () => {
    show(null);
    at("file").focus();
  });
  at("policy").addEventListener("change", drawTiles);
  at("show-tiles").addEventListener("change", () => at("tiles").toggleAttribute("hidden", !at("show-tiles").checked));
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
  at("tiles").replaceChildren();
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
  await drawTiles();
}

async function drawTiles() {
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
    at("tiles").replaceChildren();
    at("cut").textContent = `How it is cut is not known: ${error.message}`;
  }
}

function draw({ width, height, tiles, thumbnail }) {
  at("tiles").setAttribute("viewBox", `0 0 ${width} ${height}`);
  at("tiles").replaceChildren(
    ...tiles.map(([x, y, w, h]) => {
      const tile = document.createElementNS(SVG, "rect");
      for (const [name, value] of Object.entries({ x, y, width: w, height: h })) tile.setAttribute(name, value);
      return tile;
    }),
  );
  const count = tiles.length === 1 ? "1 tile" : `${tiles.length} tiles`;
  at("cut").textContent = `${width} × ${height} pixels, ${count}${thumbnail ? " and a thumbnail of the whole" : ""}`;
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

// Recent questions, in localStorage: what was asked and answered, and a thumbnail; never the picture.

import { element } from "./results.js";

const KEY = "tessera.recent";
const MOST = 12;
const at = (id) => document.getElementById(id);

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept : [];
  } catch {
    return [];
  }
}

function write(entries) {
  try {
    localStorage.setItem(KEY, JSON.stringify(entries));
  } catch {
    // storage is full or forbidden: the list is a convenience
  }
}

/** ``again`` is called with the entry whose question is to be asked again. */
export function setUp(again) {
  at("clear").addEventListener("click", () => {
    localStorage.removeItem(KEY);
    render(again);
    at("question").focus();
  });
  render(again);
}

/** ``entry``: {question, labels, answer, thumbnail, when}. */
export function remember(entry, again) {
  write([entry, ...read()].slice(0, MOST));
  render(again);
}

function render(again) {
  const entries = read();
  at("recent").hidden = !entries.length;
  at("recent-list").replaceChildren(
    ...entries.map((entry) => {
      const item = element("li");
      const button = element("button", "", "entry");
      button.type = "button";
      const image = element("img");
      image.alt = "";
      if (entry.thumbnail?.startsWith("data:image/jpeg;")) image.src = entry.thumbnail;
      const words = element("span");
      words.append(element("strong", entry.question), element("span", entry.answer, "quiet"));
      button.append(entry.thumbnail ? image : element("span", "", "no-picture"), words);
      button.addEventListener("click", () => again(entry));
      item.append(button);
      return item;
    }),
  );
}

// The page's wiring: tabs, colours, and the way from a question to its answer.

import { ask, chat, keepKey, Refused } from "./chat.js";
import * as code from "./code.js";
import * as pictures from "./pictures.js";
import * as recent from "./recent.js";
import * as results from "./results.js";
import * as status from "./status.js";
import { explain } from "./words.js";

const at = (id) => document.getElementById(id);
const SENTENCE = /^[\s\S]*?[.!?:\n](?=\s|$)/;

let model = "";
let underWay = null; // the AbortController of the answer being written

// --- tabs and colours

const TABS = ["ask", "status"];

function openTab(name) {
  for (const each of TABS) {
    const chosen = each === name;
    at(`tab-${each}`).setAttribute("aria-selected", chosen);
    at(`tab-${each}`).tabIndex = chosen ? 0 : -1;
    at(`view-${each}`).hidden = !chosen;
  }
  history.replaceState(null, "", name === "ask" ? location.pathname : `#${name}`);
  status.watch(name === "status");
}

for (const [i, name] of TABS.entries()) {
  const tab = at(`tab-${name}`);
  tab.addEventListener("click", () => openTab(name));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const other = TABS[(to + TABS.length) % TABS.length];
    openTab(other);
    at(`tab-${other}`).focus();
  });
}

at("theme").addEventListener("change", (event) => {
  const chosen = event.target.value;
  if (chosen === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("tessera.theme");
  } else {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem("tessera.theme", chosen);
  }
});

// --- question and answer

/** Speaks the answer to a screen reader by whole sentences: token by token it could not be followed. */
class Speaker {
  rest = "";

  constructor() {
    at("spoken").replaceChildren();
  }

  add(text) {
    this.rest += text;
    for (let match; (match = SENTENCE.exec(this.rest)) && match[0].length < this.rest.length; ) {
      this.say(match[0]);
      this.rest = this.rest.slice(match[0].length);
    }
  }

  end() {
    this.say(this.rest);
    this.rest = "";
  }

  say(text) {
    if (text.trim()) at("spoken").append(results.element("p", text.trim()));
  }
}

function setBusy(busy) {
  at("answer").setAttribute("aria-busy", busy);
  at("answer").classList.toggle("writing", busy);
  at("stop").hidden = !busy;
  at("ask").disabled = busy;
}

function complain(error, names) {
  const { what, todo, said } = explain(error, names);
  at("problem-what").textContent = [what, todo].filter(Boolean).join(" ");
  at("problem-said").textContent = said && `The server says: ${said}`;
  at("problem-said").hidden = !said;
  at("problem").hidden = false;
  at("placeholder").hidden = true;
  if (error instanceof Refused && error.status === 401) {
    at("key-row").hidden = false;
    at("key").focus();
  }
}

// --- the conversation: what was asked and answered, as it is sent with a follow-up question

let turns = []; // {question, answer, files, messages}

function forget() {
  turns = [];
  at("follow").checked = false;
  at("follow-row").hidden = true;
}

function drawTurns(question) {
  at("turns").replaceChildren(
    ...turns.map((turn) => {
      const item = results.element("li");
      item.append(results.element("p", turn.question, "asked"), results.element("p", turn.answer, "answered"));
      return item;
    }),
  );
  at("turns").hidden = at("asked").hidden = !turns.length;
  at("asked").textContent = question;
  at("turns").scrollTop = at("turns").scrollHeight;
}

/** What is sent: OpenAI's fields, and ours under ``tessera``. ``files``: pictures that no turn before has. */
async function requestBody(question, labels, files) {
  const images = await Promise.all(files.map(async (file) => ({ type: "image_url", image_url: { url: await pictures.dataUrl(file) } })));
  const own = {};
  if (labels.length) own.choices = labels;
  if (pictures.files().length && at("policy").value) own.tile_policy = { name: at("policy").value };
  return {
    model: model || (await findModel()),
    messages: [...turns.flatMap((turn) => turn.messages), { role: "user", content: [...images, { type: "text", text: question }] }],
    max_tokens: Number(at("max-tokens").value),
    ...(Object.keys(own).length ? { tessera: own } : {}),
  };
}

async function findModel() {
  const { data } = await (await ask("/v1/models")).json();
  model = data[0].id;
  at("model").textContent = model;
  return model;
}

async function submit() {
  const question = at("question").value.trim();
  if (!question) {
    at("question").focus();
    complain(new Error("Write a question first."));
    return;
  }
  const labels = at("labels").value.split(",").map((label) => label.trim()).filter(Boolean);
  underWay?.abort();
  const mine = (underWay = new AbortController());
  const thumbnail = pictures.thumbnail();
  const started = performance.now();
  const speaker = new Speaker();
  if (!at("follow").checked) turns = [];
  at("follow-row").hidden = !turns.length;
  const conversation = turns;
  const before = turns.flatMap((turn) => turn.files);
  const files = pictures.files().filter((file) => !before.includes(file));
  const sent = [...before, ...files];
  let text = "";
  let usage = null;
  let own = null;

  drawTurns(question);
  at("answer").textContent = "";
  at("problem").hidden = at("placeholder").hidden = true;
  results.clear();
  code.hide();
  setBusy(true);
  if (document.activeElement === at("ask") || document.activeElement === document.body) at("stop").focus({ preventScroll: true });
  bringIntoSight();
  try {
    const body = await requestBody(question, labels, files);
    code.show(body, sent);
    for await (const chunk of chat(body, mine.signal)) {
      const piece = chunk.choices?.[0]?.delta?.content ?? "";
      text += piece;
      at("answer").textContent = text;
      speaker.add(piece);
      usage = chunk.usage ?? usage;
      own = chunk.tessera ?? own;
    }
    if (own?.choices) results.showScores(own.choices);
    if (own?.timings) results.showTimes(own.timings, usage, own.image_tokens, (performance.now() - started) / 1000);
    conversation.push({ question, answer: text, files, messages: [body.messages.at(-1), { role: "assistant", content: text }] });
    at("follow-row").hidden = turns !== conversation; // where a picture was taken away meanwhile
    if (at("follow").checked) at("question").value = ""; // it stands in the conversation
    recent.remember({ question, labels, answer: text, thumbnail, when: Date.now() }, again);
  } catch (error) {
    complain(error, sent.map((file) => file.name));
  } finally {
    speaker.end();
    const stopHadFocus = document.activeElement === at("stop");
    setBusy(false);
    if (stopHadFocus) at("ask").focus({ preventScroll: true });
  }
}

/** On a small screen the answer is written below what is seen: the question goes to the top, and the answer follows. */
function bringIntoSight() {
  const { top } = at("answer-card").getBoundingClientRect();
  if (top > innerHeight * 0.7) at("question-card").scrollIntoView({ block: "start" });
}

/** Puts a recent question back; its picture is gone, so one that is shown stays. */
function again(entry) {
  at("question").value = entry.question;
  at("labels").value = entry.labels.join(", ");
  at("question").focus();
  at("question").scrollIntoView({ block: "center" });
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!at("ask").disabled) at("form").requestSubmit();
});
at("follow").addEventListener("change", () => {
  if (at("follow").checked && at("question").value.trim() === turns.at(-1)?.question) at("question").value = "";
});
at("stop").addEventListener("click", () => underWay?.abort());
at("key").addEventListener("change", () => keepKey(at("key").value));

at("theme").querySelector(`[value="${document.documentElement.dataset.theme ?? "auto"}"]`).checked = true;
pictures.setUp(forget);
code.setUp();
recent.setUp(again);
if (location.hash === "#status") openTab("status");
findModel().catch((error) => complain(error));

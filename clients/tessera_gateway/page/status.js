// The status tab: the servers' numbers, asked for again while it is seen. Read-only.

import { ask } from "./chat.js";
import { element, ms, percent } from "./results.js";

const EVERY = 2000; // milliseconds
const KEPT = 60; // points of a line
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

const lines = new Map(); // server and number -> its last values
let timer = 0;
let watched = 0; // which watch is on: an answer may come after it ended, or after the next began

export function watch(on) {
  clearTimeout(timer);
  watched += 1;
  if (on) poll(watched);
}

async function poll(mine) {
  try {
    const { servers } = await (await ask("/tessera/status")).json();
    at("servers").replaceChildren(...servers.map(card));
    const down = servers.filter((server) => !server.up).length;
    note(down ? `${down} of ${servers.length} servers do not answer.` : "All servers answer. Renewed every 2 seconds.");
  } catch (error) {
    note(`No news: ${error.message}`);
  }
  if (mine === watched) timer = setTimeout(() => poll(mine), EVERY);
}

/** Written only where it differs: a live region repeats what is written again. */
function note(text) {
  if (at("status-note").textContent !== text) at("status-note").textContent = text;
}

function card(server) {
  const made = element("section", "", "card server");
  const title = element("h2", server.server);
  title.append(element("span", server.up ? "answers" : "does not answer", server.up ? "state up" : "state down"));
  made.append(title);
  if (!server.up) {
    made.append(element("p", server.problem));
    return made;
  }
  const { requests, queue, kv_blocks: blocks, prefix_cache: cache, drafts } = server;
  const ended = Object.entries(requests.ended);
  const numbers = element("dl");
  numbers.append(
    number("Requests under way", whole(requests.in_flight), {
      below: `${whole(requests.running)} in the batch, ${whole(requests.waiting)} wait for room`,
      line: history(server.server, "in_flight", requests.in_flight),
    }),
    number("Queue", whole(Object.values(queue).reduce((a, b) => a + b, 0)), {
      below: Object.entries(queue).map(([stage, count]) => `${stage.replace("_", " ")} ${whole(count)}`).join(", "),
    }),
    number("KV blocks", `${whole(blocks.used)} of ${whole(blocks.total)}`, { share: ratio(blocks.used, blocks.total), below: "in use" }),
    number("Prefix cache hits", share(ratio(cache.cached_tokens, cache.prompt_tokens)), {
      share: ratio(cache.cached_tokens, cache.prompt_tokens),
      below: `${whole(cache.cached_tokens)} of ${whole(cache.prompt_tokens)} prompt tokens`,
    }),
    number("Device busy", share(server.device_busy), {
      below: "share of the time in which a step ran",
      line: history(server.server, "busy", server.device_busy, 1),
    }),
    number("Requests ended", whole(ended.reduce((sum, [, count]) => sum + count, 0)), {
      below: ended.map(([reason, count]) => `${reason} ${whole(count)}`).join(", ") || "none yet",
    }),
    number("First token", server.first_token_seconds == null ? "–" : `${ms(1000 * server.first_token_seconds)} ms`, { below: "mean since the start" }),
    number("Tokens written", whole(server.generated_tokens), { below: "since the start" }),
    number("Tokens drafted", whole(drafts.drafted_tokens), {
      share: ratio(drafts.accepted_tokens, drafts.drafted_tokens),
      below: `${whole(drafts.accepted_tokens)} of them were right`,
    }),
  );
  made.append(numbers);
  return made;
}

function number(name, value, { below = "", share: part = null, line = null } = {}) {
  const box = element("div", "", "number");
  const detail = element("dd", value, "value");
  box.append(element("dt", name), detail);
  if (below) box.append(element("dd", below, "quiet small"));
  if (part != null) {
    const meter = element("dd", "", "track");
    const bar = element("div", "", "bar");
    bar.style.width = `${100 * part}%`;
    meter.setAttribute("aria-hidden", "true");
    meter.append(bar);
    box.append(meter);
  }
  if (line) box.append(line);
  return box;
}

/** The number's last values as a line; ``top``: what its height stands for, the largest of them if left out. */
function history(server, name, value, top = 0) {
  const key = `${server} ${name}`;
  const values = [...(lines.get(key) ?? []), value ?? 0].slice(-KEPT);
  lines.set(key, values);
  const highest = top || Math.max(1, ...values);
  const drawn = values.length > 1 ? values : [values[0], values[0]];
  const points = drawn.map((each, i) => `${KEPT - drawn.length + i},${11 - (10 * each) / highest}`);
  const cell = element("dd", "", "history");
  cell.setAttribute("aria-hidden", "true");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 12`);
  svg.setAttribute("preserveAspectRatio", "none");
  const path = document.createElementNS(SVG, "polyline");
  path.setAttribute("points", points.join(" "));
  svg.append(path);
  cell.append(svg);
  return cell;
}

const whole = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
const ratio = (part, all) => (part == null || !all ? null : Math.min(1, part / all));
const share = (value) => (value == null ? "–" : percent(value));

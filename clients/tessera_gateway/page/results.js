// What comes with an answer: label scores as bars, milliseconds per stage as a strip.

const at = (id) => document.getElementById(id);

const STAGES = {
  preprocess: "Prepare",
  vision_queue: "Vision queue",
  vision: "Vision",
  queue: "Queue",
  first_token: "First token",
  decode: "Decode",
};

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function clear() {
  at("scores").hidden = at("times").hidden = true;
}

/** ``scores``: [{label, probability, normalized}], in the order asked. */
export function showScores(scores) {
  const best = scores.reduce((a, b) => (b.normalized > a.normalized ? b : a));
  at("scores").tBodies[0].replaceChildren(
    ...scores.map((score) => {
      const row = element("tr", "", score === best ? "best" : "");
      const label = element("th", score.label);
      label.scope = "row";
      const cell = element("td", "", "track");
      const bar = element("div", "", "bar");
      bar.style.width = `${100 * score.normalized}%`;
      bar.setAttribute("aria-hidden", "true");
      cell.append(bar);
      row.append(label, cell, element("td", percent(score.normalized)), element("td", probability(score.probability), "quiet"));
      return row;
    }),
  );
  at("scores").hidden = false;
}

/** ``timings``: stage -> milliseconds; ``usage`` as OpenAI has it; ``seconds`` as this side saw it. */
export function showTimes(timings, usage, imageTokens, seconds) {
  const stages = Object.entries(STAGES).filter(([name]) => name in timings);
  const total = stages.reduce((sum, [name]) => sum + timings[name], 0);
  at("times-total").textContent = `${ms(total)} ms`;
  at("strip").replaceChildren(
    ...stages.map(([name]) => {
      const part = element("div", "", `stage-${name}`);
      part.style.flexGrow = timings[name];
      return part;
    }),
  );
  const table = at("times").querySelector("table");
  table.tHead.rows[0].replaceChildren(
    ...stages.map(([name, words]) => {
      const head = element("th", "");
      head.scope = "col";
      const swatch = element("span", "", `swatch stage-${name}`);
      swatch.setAttribute("aria-hidden", "true");
      head.append(swatch, words);
      return head;
    }),
  );
  table.tBodies[0].rows[0].replaceChildren(...stages.map(([name]) => element("td", ms(timings[name]))));
  const parts = [`${seconds.toFixed(2)} s as this browser saw it`];
  if (usage) parts.push(`${usage.prompt_tokens} prompt tokens${imageTokens ? ` (${imageTokens} of the picture)` : ""}`, written(usage));
  at("usage").textContent = parts.join(" · ");
  at("times").hidden = false;
}

/** Of the tokens of an answer how many there are, and of those that were drafted how many were right. */
function written(usage) {
  const { accepted_prediction_tokens: right = 0, rejected_prediction_tokens: wrong = 0 } = usage.completion_tokens_details ?? {};
  return `${usage.completion_tokens} written${right + wrong ? ` (${right} of ${right + wrong} drafted were right)` : ""}`;
}

export const ms = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toString());

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

const probability = (value) => (value < 0.001 ? "p < 0.001" : `p ${value.toPrecision(2)}`);

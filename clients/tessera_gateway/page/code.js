// The request that was just made, as a program: pictures are files by their names, the key is a variable.

import { hasKey } from "./chat.js";

const at = (id) => document.getElementById(id);
const PLACE = (index) => `@@picture ${index}@@`; // of a picture's address in the request
const PLACES = /"@@picture (\d+)@@"/g;

let made = null; // {body, files}: a request whose pictures are places, and the pictures' {name, type}

export function setUp() {
  at("language").addEventListener("change", draw);
  at("copy").addEventListener("click", copy);
}

/** ``body``: as it was sent; ``files``: its pictures in order. Data: addresses are not kept. */
export function show(body, files) {
  let index = 0;
  const text = JSON.stringify(body, (key, value) => (key === "url" && index < files.length ? PLACE(index++) : value), 2);
  made = { text, files: files.map(({ name, type }) => ({ name, type: type || "image/jpeg" })) };
  at("code").hidden = false;
  draw();
}

export function hide() {
  made = null;
  at("code").hidden = true;
}

function draw() {
  at("copied").textContent = "";
  if (made) at("program").textContent = at("language").querySelector(":checked").value === "curl" ? asCurl(made) : asPython(made);
}

const quoted = (word) => `'${word.replaceAll("'", `'\\''`)}'`;

function asCurl({ text, files }) {
  const literal = text.replace(/[\\$`]/g, "\\$&"); // in a here-document these mean something
  const body = literal.replace(PLACES, (_, i) => `"data:${files[i].type};base64,$(base64 < ${quoted(files[i].name)} | tr -d '\\n')"`);
  const key = hasKey() ? '  -H "Authorization: Bearer $TESSERA_KEY" \\\n' : "";
  return `curl ${location.origin}/v1/chat/completions \\\n${key}  -H "Content-Type: application/json" -d @- <<END\n${body}\nEND`;
}

function asPython({ text, files }) {
  const key = hasKey() ? 'os.environ["TESSERA_KEY"]' : '"none"';
  const { tessera, ...standard } = JSON.parse(text);
  const fields = Object.entries(standard).map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (tessera) fields.push(`    extra_body=${python({ tessera }, 1)},`);
  const call = fields.join("\n").replace(PLACES, (_, i) => `picture(${python(files[i].name)}, ${python(files[i].type)})`);
  const picture = `def picture(file, media_type):
    with open(file, "rb") as opened:
        return f"data:{media_type};base64,{base64.b64encode(opened.read()).decode()}"


`;
  return `${files.length ? "import base64\n" : ""}${hasKey() ? "import os\n" : ""}${files.length || hasKey() ? "\n" : ""}from openai import OpenAI

${files.length ? `\n${picture}` : ""}client = OpenAI(base_url=${python(`${location.origin}/v1`)}, api_key=${key})
response = client.chat.completions.create(
${call}
)
print(response.choices[0].message.content)`;
}

/** A value of JSON as Python writes it; strings are the same in both. */
function python(value, depth = 0) {
  const [inner, outer] = ["    ".repeat(depth + 1), "    ".repeat(depth)];
  if (Array.isArray(value)) return value.length ? `[\n${value.map((each) => `${inner}${python(each, depth + 1)},\n`).join("")}${outer}]` : "[]";
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${python(each, depth + 1)},\n`);
  return `{\n${entries.join("")}${outer}}`;
}

async function copy() {
  try {
    await navigator.clipboard.writeText(at("program").textContent); // where the page came by https, or from this machine
  } catch {
    getSelection().selectAllChildren(at("program"));
    if (!document.execCommand("copy")) {
      at("copied").textContent = "It is selected: copy it by Ctrl + C.";
      return;
    }
    getSelection().removeAllRanges();
  }
  at("copied").textContent = "Copied.";
}

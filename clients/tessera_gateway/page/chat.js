// The conversation with the gateway: one streamed answer, and the key where it asks for one.

const KEY = "tessera.key"; // in sessionStorage: forgotten with the tab

export class Refused extends Error {
  /** ``status``: HTTP's, 0 for a line that broke; ``code``: the gateway's word for it, where it has one. */
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** fetch with the key; throws Refused with the gateway's own words. */
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let said = { message: `${response.status} ${response.statusText}` };
  try {
    said = (await response.json()).error;
  } catch {
    // no error object: something between here and the gateway answered
  }
  throw new Refused(response.status, said.message, said.code);
}

/** The chunks of a streamed answer, as objects, until [DONE]. Throws Refused, also for an error in mid-stream. */
export async function* chat(body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message, chunk.error.code);
    yield chunk;
  }
  throw new Refused(0, "the gateway closed the connection");
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

// Errors in words for people: what happened, what to do; the server's own words stand beneath.

const BUSY = "The server has more to do than it can take.";
const AWAY = "The model's server does not answer: it is starting, restarting or stopped.";
const LATE = "The answer was not ready within the time allowed.";
const FAULT = "The server failed at this question. That is not your fault.";
const WAIT = "Try again in a few seconds; Status shows how busy it is.";
const AGAIN = "Try again; if it happens again, its log says why.";

// By HTTP status, and by the code of an error in the middle of an answer.
const KNOWN = {
  401: ["This gateway asks for a key.", "Write yours under the question and ask again."],
  403: ["This page may not ask here.", "Open it by the gateway's own address."],
  404: ["The gateway does not know this model any more.", "Load this page again."],
  413: ["The pictures are too large for one question.", "Send fewer, or smaller ones."],
  429: [BUSY, WAIT],
  overloaded: [BUSY, WAIT],
  503: [AWAY, WAIT],
  server_unavailable: [AWAY, WAIT],
  504: [LATE, "Ask for a shorter answer, or try again when it is less busy."],
  deadline_exceeded: [LATE, "Ask for a shorter answer, or try again when it is less busy."],
};
const OF_A_REQUEST = [
  // what the server says, what it means, what to do
  [/context|too many tokens|prompt (is|of)|max_tokens/i, "This does not fit the model's memory for one question.", "Allow the answer fewer tokens, ask with fewer pictures, or begin a new conversation."],
  [/decode|not an image|no image|zero bytes|JPEG|PNG|truncated|cannot read/i, "A picture cannot be read.", "The server reads JPEG, PNG and WebP: remove it, or save it as one of these."],
  [/pixel|tiles|images/i, "This is more picture than the server takes.", "Ask with fewer or smaller pictures."],
];

/** ``error``: what was thrown; ``names``: of the pictures that were sent, in order. -> {what, todo, said} */
export function explain(error, names = []) {
  if (error.name === "AbortError") return { what: "Stopped.", todo: "", said: "" };
  if (error.status === undefined) {
    // fetch's own TypeError: nothing came back at all
    if (error instanceof TypeError) return { what: "The gateway does not answer.", todo: "See whether tessera serve still runs, and try again.", said: "" };
    return { what: error.message, todo: "", said: "" };
  }
  const said = named(error.message, names);
  if (error.status === 0) return { what: "The answer broke off: the connection was closed.", todo: AGAIN, said };
  const known = KNOWN[error.status] ?? (isRequest(error.status) ? ofRequest(error.message) : [FAULT, AGAIN]);
  return { what: known[0], todo: known[1], said };
}

const isRequest = (status) => (status >= 400 && status < 500) || status === "invalid_request";

function ofRequest(message) {
  const [, what, todo] = OF_A_REQUEST.find(([pattern]) => pattern.test(message)) ?? [];
  return what ? [what, todo] : ["The server does not take this question as it is.", "Change what it names, and ask again."];
}

/** The server counts pictures from 0; people know them by their names. */
export const named = (message, names) =>
  message.replace(/\bimage (\d+)\b/g, (whole, index) => (names[index] ? `picture ${Number(index) + 1} (${names[index]})` : whole));

// Errors in words for people: what happened, what to do; the server's own words stand beneath.

const BUSY = "The server has more to do than it can take.";
const AWAY = "The model's server does not answer: it is starting, restarting or stopped.";
const LATE = "The answer was not ready within the time allowed.";
const FAULT = "The server failed at this question. That is not your fault.";
const WAIT = "Try again in a few seconds; Status shows how busy it is.";
const AGAIN = "Try again; if it happens again, its log says why.";

// By the gateway's code, or else by HTTP's status; in the middle of an answer there is a code alone.
const KNOWN = {
  overloaded: [BUSY, WAIT],
  too_many_connections: [BUSY, WAIT],
  server_unavailable: [AWAY, WAIT],
  deadline_exceeded: [LATE, "Allow the answer fewer tokens, or try again when it is less busy."],
  slow_body: ["The pictures did not arrive at the gateway in time.", "Try again, on a faster line or with smaller pictures."],
  401: ["This gateway asks for a key.", "Write yours under the question and ask again."],
  403: ["This page may not ask here.", "Open it by the gateway's own address."],
  404: ["The gateway does not know this model any more.", "Load this page again."],
  413: ["The pictures are too large for one question.", "Send fewer, or smaller ones."],
  429: [BUSY, WAIT],
  503: [AWAY, WAIT],
};
const OF_A_REQUEST = [
  // what the server says, what it means, what to do
  [/exceeds? the context/i, "This does not fit the model's memory for one question.", "Allow the answer fewer tokens, ask with fewer pictures, or begin a new conversation."],
  [/(JPEG|PNG|WebP)|is empty|zero bytes|size cannot be read/i, "A picture cannot be read.", "The server reads JPEG, PNG and WebP: remove it, or save it as one of these."],
  [/(images|megapixels|bytes).*the limit is/i, "This is more picture than the server takes.", "Ask with fewer or smaller pictures."],
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
  const known = KNOWN[error.code] ?? KNOWN[error.status] ?? (isRequest(error) ? ofRequest(error.message) : [FAULT, AGAIN]);
  return { what: known[0], todo: known[1], said };
}

const isRequest = ({ status, code }) => (status >= 400 && status < 500) || code === "invalid_request";

function ofRequest(message) {
  const [, what, todo] = OF_A_REQUEST.find(([pattern]) => pattern.test(message)) ?? [];
  return what ? [what, todo] : ["The server does not take this question as it is.", "Change what it names, and ask again."];
}

/** The server counts pictures from 0; people know them by their names. */
export const named = (message, names) =>
  message.replace(/\bimage (\d+)\b/g, (whole, index) => (names[index] ? `picture ${Number(index) + 1} (${names[index]})` : whole));

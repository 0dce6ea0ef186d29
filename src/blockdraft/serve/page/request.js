// Owns what is asked: settings and messages into a request body, and a body into a line for a shell. Knows no page.

// Fields that are left out where they are null: the server's own value holds then.
const OPTIONAL = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

// way: "plain" or "speculative". settings: {model, system, width (null: the server's choice), ...the fields above}.
export function requestBody(way, settings, messages) {
  const body = { model: settings.model, messages: withSystem(settings.system, messages) };
  for (const name of OPTIONAL) {
    if (settings[name] !== null) body[name] = settings[name];
  }
  body.speculation = { enabled: way === "speculative", tokens: true };
  if (way === "speculative" && settings.width !== null) body.speculation.width = settings.width;
  body.stream = true;
  body.stream_options = { include_usage: true };
  return body;
}

// A command that sends exactly this body. The key is a shell variable: it is never written out.
export function asCurl(url, body, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $BLOCKDRAFT_API_KEY"` : "";
  const json = JSON.stringify(body, null, 2);
  return `curl -sN ${quoted(url)} \\\n  -H 'Content-Type: application/json'${key} \\\n  --data-raw ${quoted(json)}\n`;
}

// One to be repeated: sampling without a seed cannot be run twice, neither side by side nor from a shell.
export function newSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

function withSystem(system, messages) {
  return system.trim() === "" ? messages : [{ role: "system", content: system }, ...messages];
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

// Owns the talk with the server: what is asked where, and what went wrong in words. Knows no page.

import { SseParser } from "./sse.js";

export class ApiError extends Error {
  // status 0: no answer came. retryAfterS: seconds the server asks to wait, or null.
  constructor(message, { status = 0, retryAfterS = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

export const CHAT_URL = new URL("v1/chat/completions", document.baseURI).href;
const INFO_URL = new URL("info", document.baseURI).href;
const UNREACHABLE = "The server cannot be reached. Check that it still runs, then retry.";
const CUT_OFF = "The connection ended before the answer did.";

export async function readInfo(key) {
  const response = await ask(INFO_URL, { headers: withKey({}, key) });
  try {
    return await response.json();
  } catch {
    throw new ApiError("GET /info gave no JSON: is this a blockdraft server?", { status: response.status });
  }
}

// The chunks of one streamed chat completion. Ends with the server's [DONE]; anything less is an ApiError.
export async function* streamChat(body, { key, signal }) {
  const response = await ask(CHAT_URL, {
    method: "POST",
    headers: withKey({ "Content-Type": "application/json" }, key),
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.getReader();
  const parser = new SseParser();
  try {
    for (;;) {
      const { done, value } = await reading(reader);
      for (const data of done ? parser.end() : parser.feed(value)) {
        if (data === "[DONE]") return;
        yield checkedChunk(data, response.status);
      }
      if (done) throw new ApiError(CUT_OFF, { status: response.status });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reading(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(CUT_OFF);
  }
}

function checkedChunk(data, status) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError(`The server sent an event that is not JSON: ${data.slice(0, 120)}`, { status });
  }
  if (chunk.error) throw new ApiError(chunk.error.message ?? "The server broke off.", { status });
  return chunk;
}

async function ask(url, options) {
  let response;
  try {
    response = await fetch(url, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 300) || response.statusText || "no reason given";
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not an error object of this API: what came is shown as it is
  }
  const wait = Number(response.headers.get("Retry-After") ?? NaN);
  return new ApiError(message, { status: response.status, retryAfterS: Number.isFinite(wait) ? wait : null });
}

function withKey(headers, key) {
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

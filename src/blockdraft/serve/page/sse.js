// Owns the grammar of server-sent events: bytes in, the data of whole events out. Knows no JSON and no API.

export class SseParser {
  #decoder = new TextDecoder("utf-8");
  #rest = "";
  #data = [];

  // The data of every event that these bytes complete. Bytes may be cut anywhere, inside characters and line ends too.
  feed(bytes) {
    return this.#take(this.#decoder.decode(bytes, { stream: true }));
  }

  // The stream is over. An event without its empty line is incomplete and is dropped, as the standard asks.
  end() {
    const events = this.#take(this.#decoder.decode());
    this.#rest = "";
    this.#data = [];
    return events;
  }

  #take(text) {
    this.#rest += text;
    const events = [];
    let start = 0;
    for (;;) {
      const end = this.#rest.slice(start).search(/[\r\n]/);
      if (end < 0) break;
      const at = start + end;
      // A carriage return at the very end may be half of a line end: its other half decides.
      if (this.#rest[at] === "\r" && at + 1 === this.#rest.length) break;
      this.#line(this.#rest.slice(start, at), events);
      start = at + (this.#rest.startsWith("\r\n", at) ? 2 : 1);
    }
    this.#rest = this.#rest.slice(start);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length > 0) events.push(this.#data.join("\n"));
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    if (field !== "data") return; // comments, names and ids of events say nothing here
    const value = colon < 0 ? "" : line.slice(colon + 1);
    this.#data.push(value.startsWith(" ") ? value.slice(1) : value);
  }
}

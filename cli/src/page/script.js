// Puts what the server draws in place without losing where one is, and types into consoles.
"use strict";

const $ = (id) => document.getElementById(id);

// Makes `old` like `fresh`. Elements with an id are kept, so focus, selection and scrolling stay.
function morph(old, fresh) {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  // What somebody types is theirs.
  if (old === document.activeElement && old instanceof HTMLInputElement) return;
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const known = wanted.id && $(wanted.id);
    if (known && known.parentNode === old && known !== at) old.insertBefore(known, at), (at = known);
    const alike = at && at.nodeType === wanted.nodeType && at.nodeName === wanted.nodeName && (at.id || "") === (wanted.id || "");
    if (!alike) {
      old.insertBefore(document.importNode(wanted, true), at);
      continue;
    }
    if (at.nodeType !== Node.ELEMENT_NODE) {
      if (at.data !== wanted.data) at.data = wanted.data;
    } else if (!at.isEqualNode(wanted)) morph(at, wanted);
    at = at.nextSibling;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

const statuses = () => new Map([...document.querySelectorAll("[data-status]")].map((e) => [e.id, [e.dataset.name, e.dataset.status]]));

function live(of) {
  const source = new EventSource("/events?of=" + encodeURIComponent(of));
  const main = $("main");
  source.onopen = () => ($("link").textContent = "Live");
  source.onerror = () =>
    ($("link").textContent = source.readyState === EventSource.CLOSED ? "Ended; open the page anew" : "Connection lost; trying again");
  source.onmessage = (event) => {
    const fresh = main.cloneNode(false);
    fresh.replaceChildren(...new DOMParser().parseFromString(event.data, "text/html").body.childNodes);
    const before = statuses();
    morph(main, fresh);
    const news = [];
    for (const [id, [name, status]] of statuses()) {
      const known = before.get(id);
      if (!known || known[1] !== status) news.push(`${name} is ${status || "unknown"}`);
    }
    for (const [id, [name]] of before) if (!$(id)) news.push(`${name} is gone`);
    if (news.length) $("news").textContent = news.slice(0, 5).join("; ");
  };
  addEventListener("pagehide", () => source.close());
}

// As much of a terminal as lines of text need: what is written over stays written over, colours are left out.
class Screen {
  constructor(element) {
    this.element = element;
    this.lines = [[]];
    this.column = 0;
    this.rest = "";
  }
  write(text) {
    text = this.rest + text;
    this.rest = "";
    for (let i = 0; i < text.length; i++) {
      const line = this.lines.at(-1);
      const c = text[i];
      if (c === "\x1b") {
        const found = /^\x1b(\[([0-9;?]*)[ -\/]*([@-~])|\][^\x07\x1b]*(\x07|\x1b\\)|[()][ -~]|[^\[\]()])/.exec(text.slice(i));
        if (!found) {
          // The rest of it is still to come, or it is none.
          if (text.length - i < 256) this.rest = text.slice(i);
          break;
        }
        i += found[0].length - 1;
        const n = parseInt(found[2], 10) || 0;
        if (found[3] === "K" && n === 0) line.length = Math.min(line.length, this.column);
        if (found[3] === "J" && n >= 2) (this.lines = [[]]), (this.column = 0);
        if (found[3] === "C") this.column += n || 1;
        if (found[3] === "D") this.column = Math.max(0, this.column - (n || 1));
        if (found[3] === "G") this.column = Math.max(0, (n || 1) - 1);
      } else if (c === "\n") {
        this.lines.push([]);
        this.column = 0;
      } else if (c === "\r") this.column = 0;
      else if (c === "\b") this.column = Math.max(0, this.column - 1);
      else if (c === "\t") this.column += 8 - (this.column % 8);
      else if (c >= " ") {
        while (line.length < this.column) line.push(" ");
        line[this.column++] = c;
      }
    }
    if (this.lines.length > 2000) this.lines.splice(0, this.lines.length - 2000);
    this.drawn ??= requestAnimationFrame(() => this.draw());
  }
  draw() {
    this.drawn = undefined;
    const e = this.element;
    const below = e.scrollTop + e.clientHeight >= e.scrollHeight - 4;
    e.textContent = this.lines.map((l) => l.join("").trimEnd()).join("\n");
    if (below) e.scrollTop = e.scrollHeight;
  }
}

const KEYS = {
  Enter: "\r", Backspace: "\x7f", Escape: "\x1b", Delete: "\x1b[3~", ArrowUp: "\x1b[A", ArrowDown: "\x1b[B",
  ArrowRight: "\x1b[C", ArrowLeft: "\x1b[D", Home: "\x1b[H", End: "\x1b[F", PageUp: "\x1b[5~", PageDown: "\x1b[6~",
};

function console_(section) {
  const screen = new Screen($("screen"));
  const [line, each, state] = [$("line"), $("each"), $("console-state")];
  const controls = [line, ...section.querySelectorAll("button")];
  const socket = new WebSocket(`ws://${location.host}${section.dataset.stream}`);
  socket.binaryType = "arraybuffer";
  const decoder = new TextDecoder();
  const send = (text) => socket.readyState === WebSocket.OPEN && socket.send(new TextEncoder().encode(text));
  const enable = (on) => controls.forEach((c) => (c.disabled = !on));
  socket.onopen = () => {
    state.textContent = "Connected";
    enable(true);
    line.focus();
  };
  socket.onmessage = (event) => screen.write(decoder.decode(event.data, { stream: true }));
  socket.onclose = (event) => {
    state.textContent = "Closed" + (event.reason ? `: ${event.reason}` : "");
    enable(false);
  };
  $("typing").addEventListener("submit", (event) => {
    event.preventDefault();
    send(line.value + "\r");
    line.value = "";
  });
  section.querySelectorAll("[data-key]").forEach((b) =>
    b.addEventListener("click", () => {
      send(String.fromCharCode(b.dataset.key));
      line.focus();
    }),
  );
  line.addEventListener("keydown", (event) => {
    if (!each.checked || event.key === "Tab" || event.metaKey || event.isComposing) return;
    const control = event.ctrlKey && /^[a-z\[\\\]]$/i.test(event.key) && String.fromCharCode(event.key.toUpperCase().charCodeAt(0) & 31);
    const key = control || KEYS[event.key] || (!event.ctrlKey && event.key.length === 1 && event.key);
    if (!key) return;
    event.preventDefault();
    send(event.altKey && !control ? "\x1b" + key : key);
  });
  addEventListener("pagehide", () => socket.close());
}

if (document.body.dataset.live) live(document.body.dataset.live);
if ($("console")) console_($("console"));

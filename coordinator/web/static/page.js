// The live page of a coordinator: shows the pictures that `/live` sends, and asks for changes at `/change`.
"use strict";

const KEPT_MS = 300_000;
const MOST_LANES = 12;
const COLOURS = 8;
const LANE = 20;
const AGAIN_MS = 5_000;

const byId = (id) => document.getElementById(id);
const spans = new Map(); // by number: [number, GPU, client, kind, start, end]
const colours = new Map(); // by client: the number of a colour
const loads = new Map(); // by GPU: [time in ms, part of it in which kernels ran] each
let picture = null;
let source = null;
let token = null; // in memory only: a reload forgets it

// --- figures ---------------------------------------------------------------------------------------------------------

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

function duration(ms) {
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

const percent = (part) => (part ? `${Math.round(part * 100)} %` : "–");

function colour(client) {
  if (!colours.has(client)) colours.set(client, colours.size % COLOURS);
  return `var(--c${colours.get(client)})`;
}

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

const make = (kind, content) => Object.assign(document.createElement(kind), { textContent: content });

// Every other part between backticks is a command.
const withCode = (line) => line.split("`").map((part, index) => (index % 2 ? make("code", part) : part));

function sentence(element, line) {
  if (element.textContent !== line.replaceAll("`", "")) element.replaceChildren(...withCode(line));
}

function list(element, lines) {
  if (element.dataset.lines === lines.join("\n")) return;
  element.dataset.lines = lines.join("\n");
  element.replaceChildren(...lines.map((line) => {
    const item = document.createElement("li");
    item.append(...withCode(line));
    return item;
  }));
}

// --- the connection --------------------------------------------------------------------------------------------------

function say(state, bad = false) {
  text(byId("connection"), state);
  byId("connection").classList.toggle("bad", bad);
}

function connect() {
  if (source !== null || document.hidden) return;
  source = new EventSource("live");
  source.onmessage = (message) => take(JSON.parse(message.data));
  source.onerror = () => {
    say("no connection; trying again", true);
    if (source.readyState === EventSource.CLOSED) {
      disconnect();
      setTimeout(connect, AGAIN_MS);
    }
  };
}

function disconnect() {
  source?.close();
  source = null;
}

function take(message) {
  if ("may_change" in message) {
    byId("unlock").hidden = !message.may_change || token !== null;
    return;
  }
  if ("error" in message) {
    say(message.error, true);
    return;
  }
  if (message.whole) spans.clear();
  for (const span of message.spans) spans.set(span[0], span);
  for (const [number, span] of spans) {
    if (span[5] !== null && span[5] < message.now_ms - KEPT_MS) spans.delete(number);
  }
  picture = message;
  for (const gpu of picture.gpus) keepLoad(gpu);
  say("live");
  show();
}

// --- the page --------------------------------------------------------------------------------------------------------

function show() {
  const kind = picture.simulated ? "simulated " : "";
  text(byId("node"), `${picture.gpus.length} ${kind}GPU${picture.gpus.length === 1 ? "" : "s"}, ${picture.directory}`);
  const idle = picture.programs.filter((each) => each.gpu === null).map((each) => each.name);
  const notes = [...picture.notes];
  if (idle.length) notes.push(`on no GPU yet: ${idle.join(", ")}`);
  if (picture.left_out) notes.push(`${picture.left_out} more programs are not shown`);
  list(byId("notes"), notes);
  const wanted = new Set(picture.gpus.map((gpu) => `gpu-${gpu.uuid}`));
  for (const section of [...byId("gpus").children]) if (!wanted.has(section.id)) section.remove();
  for (const gpu of picture.gpus) showGpu(gpu);
}

function newSection(gpu) {
  const section = byId("gpu").content.firstElementChild.cloneNode(true);
  section.id = `gpu-${gpu.uuid}`;
  const title = section.querySelector("h2");
  title.id = `title-${gpu.uuid}`;
  section.setAttribute("aria-labelledby", title.id);
  title.append(`GPU ${gpu.index} `, make("small", gpu.name));
  text(section.querySelector("caption"), `Programs on GPU ${gpu.index}`);
  const form = section.querySelector("form");
  const setQuantum = (quantum_ns) => change({ ask: "set", setting: "quantum", gpu: gpu.uuid, value: quantum_ns });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setQuantum(Math.round(form.querySelector("input").valueAsNumber * 1e6));
  });
  form.querySelector(".automatic").addEventListener("click", () => setQuantum(null));
  byId("gpus").append(section);
  new ResizeObserver(() => drawAll()).observe(section);
  return section;
}

function showGpu(gpu) {
  const section = byId(`gpu-${gpu.uuid}`) ?? newSection(gpu);
  const programs = picture.programs.filter((each) => each.gpu === gpu.uuid);
  sentence(section.querySelector(".why"), gpu.why);
  list(section.querySelector(".notes"), gpu.notes);
  const running = programs.filter((each) => each.running).map((each) => each.name);
  const waiting = programs.filter((each) => each.waiting_ms !== null);
  const queue = waiting.map((each) => `${each.name} (${duration(each.waiting_ms)})`);
  const sentences = [running.length ? `Running: ${running.join(", ")}.` : "No program runs."];
  sentences.push(queue.length ? `Waiting: ${queue.join(", ")}.` : "No program waits.");
  text(section.querySelector(".queue"), sentences.join(" "));
  const quantum = `quantum ${duration(gpu.quantum_ns / 1e6)}${gpu.quantum_automatic ? " (automatic)" : ""}`;
  const cost = gpu.switch_cost_ns ? `a switch costs ${duration(gpu.switch_cost_ns / 1e6)}` : "switches cost nothing yet";
  text(section.querySelector(".facts"), `policy ${gpu.policy}, sharing ${gpu.sharing}, ${quantum}, ${cost}`);
  section.querySelector("form input").placeholder = Math.round(gpu.quantum_ns / 1e6);
  showMemory(section.querySelector(".memory"), gpu, programs);
  showPrograms(section, gpu, programs);
  text(section.querySelector(".card .text"), gpu.card);
  section.querySelector(".card").hidden = !gpu.card;
  drawLoad(section.querySelector(".load"), gpu);
  draw(section.querySelector(".timeline"), gpu);
}

function showMemory(element, gpu, programs) {
  const evicted = Math.max(0, gpu.allocated_bytes - gpu.resident_bytes);
  const line = `${size(gpu.resident_bytes)} of ${size(gpu.capacity_bytes)} in use, ${size(evicted)} evicted`;
  text(element.querySelector(".text"), line);
  const bar = element.querySelector(".bar");
  bar.setAttribute("aria-label", `Memory: ${line}`);
  parts(bar, programs.map((each) => ["", each.client, each.resident_bytes / gpu.capacity_bytes]));
}

// The coloured parts of a bar: [class, client, share of the width] each.
function parts(bar, wanted) {
  while (bar.children.length > wanted.length) bar.lastChild.remove();
  while (bar.children.length < wanted.length) bar.append(document.createElement("span"));
  wanted.forEach(([kind, client, share], index) => {
    const part = bar.children[index];
    part.className = kind;
    if (kind === "limit") {
      part.style.left = `calc(${Math.min(1, share) * 100}% - 2px)`;
      part.style.width = part.style.backgroundColor = "";
      return;
    }
    part.style.left = "";
    part.style.width = `${Math.min(1, share) * 100}%`;
    part.style.backgroundColor = colour(client);
  });
}

function newRow(each) {
  const row = byId("program").content.firstElementChild.cloneNode(true);
  row.dataset.client = each.client;
  const client = `c${each.client}`;
  const button = row.querySelector(".pause");
  button.addEventListener("click", () => change({ ask: row.dataset.paused ? "resume" : "pause", client }));
  row.querySelector(".end").setAttribute("aria-label", `End ${each.name}`);
  row.querySelector(".end").addEventListener("click", () => {
    if (window.confirm(`End ${each.name} (process ${each.pid})?`)) change({ ask: "end", client });
  });
  const select = row.querySelector("select");
  select.setAttribute("aria-label", `Class of ${each.name}`);
  select.addEventListener("change", () => change({ ask: "set", setting: "class", client, value: select.value }));
  return row;
}

function showPrograms(section, gpu, programs) {
  const body = section.querySelector("tbody");
  const rows = new Map([...body.children].map((row) => [row.dataset.client, row]));
  section.querySelector("table").hidden = !programs.length;
  section.querySelector(".none").hidden = programs.length > 0;
  // Rows stay in the order of their programs' start, so that a row does not move under the pointer.
  const only = byId("filter").value.trim().toLowerCase();
  const shown = programs.filter((each) => `${each.name}\n${each.user}`.toLowerCase().includes(only));
  for (const each of shown.sort((one, other) => one.client - other.client)) {
    const row = rows.get(String(each.client)) ?? body.appendChild(newRow(each));
    rows.delete(String(each.client));
    showProgram(row, gpu, each);
  }
  for (const row of rows.values()) row.remove();
}

function showProgram(row, gpu, each) {
  const cell = (name) => row.querySelector(`.${name}`);
  row.classList.toggle("running", each.running);
  cell("swatch").style.backgroundColor = colour(each.client);
  text(cell("name"), each.name);
  text(cell("pid"), each.pid ? `(${each.pid})` : "");
  for (const name of ["user", "class", "mode"]) text(cell(name), each[name]);
  text(cell("state"), each.state);
  cell("state").title = each.why ?? "";
  text(cell("progress"), percent(each.progress));
  text(cell("share"), percent(each.share));
  const figures = [size(each.resident_bytes)];
  if (each.evicted_bytes) figures.push(`${size(each.evicted_bytes)} evicted`);
  if (each.moving) figures.push(`moves ${each.moving}`);
  if (each.limit_bytes) figures.push(`limit ${size(each.limit_bytes)}`);
  text(row.querySelector(".text"), figures.join(", "));
  const bar = [
    ["", each.client, each.resident_bytes / gpu.capacity_bytes],
    ["evicted", each.client, each.evicted_bytes / gpu.capacity_bytes],
  ];
  if (each.limit_bytes) bar.push(["limit", each.client, each.limit_bytes / gpu.capacity_bytes]);
  parts(cell("bar"), bar);
  row.dataset.paused = each.paused ? "yes" : "";
  const button = row.querySelector(".pause");
  text(button, each.paused ? "Resume" : "Pause");
  button.setAttribute("aria-label", `${button.textContent} ${each.name}`);
  const select = row.querySelector("select");
  if (document.activeElement !== select) select.value = each.class.replace("-", "_");
}

// --- how busy a card is -----------------------------------------------------------------------------------------------

function keepLoad(gpu) {
  if (gpu.busy === null) return;
  const kept = loads.get(gpu.uuid) ?? [];
  kept.push([picture.now_ms, gpu.busy]);
  while (kept[0][0] < picture.now_ms - KEPT_MS) kept.shift();
  loads.set(gpu.uuid, kept);
}

function drawLoad(canvas, gpu) {
  const kept = loads.get(gpu.uuid) ?? [];
  const seconds = Number(byId("window").value);
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  pen.scale(scale, scale);
  pen.fillStyle = ink("bar");
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = ink("accent");
  const x = (at) => width * (1 - (picture.now_ms - at) / (seconds * 1000));
  kept.forEach(([at, busy], index) => {
    const end = kept[index + 1]?.[0] ?? picture.now_ms;
    pen.fillRect(x(at), height * (1 - busy), Math.max(1, x(end) - x(at)), height * busy);
  });
  const mean = kept.reduce((sum, each) => sum + each[1], 0) / Math.max(1, kept.length);
  canvas.setAttribute("aria-label", `GPU ${gpu.index} was busy for ${Math.round(mean * 100)} % of the time shown`);
}

// --- the time line ---------------------------------------------------------------------------------------------------

// The spans of a GPU within the window, a lane for each program.  What lasts comes from the programs' state too: events
// tell of a wait when it is over, and of no lease from before the page's process started.
function lanesOf(gpu, beginMs) {
  const lanes = new Map();
  const add = (client, span) => lanes.set(client, [...(lanes.get(client) ?? []), span]);
  const within = [...spans.values()].filter((span) => span[1] === gpu.uuid && (span[5] ?? Infinity) > beginMs);
  for (const [, , client, kind, start, end] of within) add(client, { kind, start, end: end ?? picture.now_ms });
  const openHolds = new Set(within.filter((span) => span[3] === "hold" && span[5] === null).map((span) => span[2]));
  for (const each of picture.programs) {
    if (each.gpu !== gpu.uuid) continue;
    const since = (kind, ms) => add(each.client, { kind, start: picture.now_ms - ms, end: picture.now_ms });
    if (each.waiting_ms !== null) since("wait", each.waiting_ms);
    if (each.holding_ms !== null && !openHolds.has(each.client)) since("hold", each.holding_ms);
  }
  return [...lanes].sort(([one], [other]) => one - other).slice(-MOST_LANES);
}

function draw(canvas, gpu) {
  const seconds = Number(byId("window").value);
  const beginMs = picture.now_ms - seconds * 1000;
  const lanes = lanesOf(gpu, beginMs);
  const width = canvas.parentElement.clientWidth - 32;
  const height = Math.max(1, lanes.length) * LANE + 22;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const ink = (name) => style.getPropertyValue(`--${name}`);
  const inkOf = (client) => ink(colour(client).slice(6, -1));
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const gutter = Math.min(130, width / 4);
  const x = (at) => gutter + Math.max(0, (at - beginMs) / (seconds * 1000)) * (width - gutter);
  drawAxis(pen, { gutter, width, bottom: height - 20, seconds, line: ink("line"), faint: ink("faint") });
  lanes.forEach(([client, marks], index) => {
    const top = index * LANE;
    pen.fillStyle = ink("text");
    pen.save();
    pen.beginPath();
    pen.rect(0, top, gutter - 6, LANE);
    pen.clip();
    pen.fillText(picture.names[client] ?? `client c${client}`, 0, top + LANE / 2);
    pen.restore();
    const shapes = {
      wait: [ink("faint"), top + LANE / 2 - 1, 2],
      hold: [inkOf(client), top + 3, 12],
      out: [ink("out"), top + LANE - 4, 3],
      in: [ink("in"), top + LANE - 4, 3],
    };
    for (const [kind, [fill, y, tall]] of Object.entries(shapes)) {
      pen.fillStyle = fill;
      for (const mark of marks) {
        if (mark.kind === kind) pen.fillRect(x(mark.start), y, Math.max(1, x(mark.end) - x(mark.start)), tall);
      }
    }
  });
  const told = lanes.map(([client, marks]) => {
    const held = marks.filter((mark) => mark.kind === "hold");
    const sum = held.reduce((all, mark) => all + mark.end - Math.max(mark.start, beginMs), 0);
    return `${picture.names[client] ?? `client c${client}`} held it ${Math.round(sum / (seconds * 10))} % of the time`;
  });
  const label = `Time line of GPU ${gpu.index}, last ${seconds} seconds: ${told.join("; ") || "no program held it"}`;
  canvas.setAttribute("aria-label", label);
}

function drawAxis(pen, { gutter, width, bottom, seconds, line, faint }) {
  const step = width < 500 ? seconds / 2 : seconds <= 30 ? 10 : seconds / 4;
  for (let back = 0; back <= seconds; back += step) {
    const at = gutter + (1 - back / seconds) * (width - gutter);
    pen.fillStyle = line;
    pen.fillRect(Math.min(at, width - 1), 0, 1, bottom + 3);
    pen.fillStyle = faint;
    pen.textAlign = back === 0 ? "right" : back === seconds ? "left" : "center";
    pen.fillText(back === 0 ? "now" : `−${back} s`, at, bottom + 12);
  }
  pen.textAlign = "left";
}

function drawAll() {
  if (picture === null) return;
  for (const gpu of picture.gpus) {
    const canvas = byId(`gpu-${gpu.uuid}`)?.querySelector(".timeline");
    if (canvas) draw(canvas, gpu);
  }
}

// --- changes ---------------------------------------------------------------------------------------------------------

async function ask(request, withToken) {
  const headers = { "Content-Type": "application/json", "X-NVShare-Token": withToken };
  try {
    const reply = await fetch("change", { method: "POST", headers, body: JSON.stringify(request) });
    return (await reply.json()).error?.text ?? "";
  } catch {
    return "the coordinator does not answer";
  }
}

async function change(request) {
  sentence(byId("refusal"), await ask(request, token));
}

async function unlock(event) {
  event.preventDefault();
  const refusal = await ask({ ask: "ping" }, byId("token").value);
  sentence(byId("token-refusal"), refusal);
  if (refusal) return;
  token = byId("token").value;
  byId("token").value = "";
  document.body.classList.add("unlocked");
  byId("unlock").hidden = true;
  byId("token-dialog").close();
}

byId("unlock").addEventListener("click", () => byId("token-dialog").showModal());
byId("token-cancel").addEventListener("click", () => byId("token-dialog").close());
byId("token-form").addEventListener("submit", unlock);
byId("window").addEventListener("change", drawAll);
byId("filter").addEventListener("input", () => picture && show());
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
connect();

// The token explorer of a report: unpacks what mismatch/reports/sections/explorer.py packed, and draws
// what is on the screen. Every text of a run enters the page as textContent; there is no markup from data.
(() => {
"use strict";
const root = document.getElementById("explorer"), packed = [...document.querySelectorAll("[data-of=explorer]")];
if (!root || !packed.length || typeof DecompressionStream === "undefined") return;
const $ = name => root.querySelector(`[data-part="${name}"]`);
const ROW = 44, BLOCK = 400, SLICE = 12, LEVELS = 5;
const el = (tag, text = "", name = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (name) node.className = name;
  return node;
};
const pause = () => new Promise(go => { const c = new MessageChannel(); c.port1.onmessage = go; c.port2.postMessage(0); });
let deadline = 0;
const rest = async () => {  // gives way to the browser wherever a slice of time is used up
  if (performance.now() > deadline) { await pause(); deadline = performance.now() + SLICE; }
};

// ---------------------------------------------------------------- unpacking

let lines;
async function unpack(name) {
  const text = lines[name];
  if (text === undefined) return null;
  const stream = new DecompressionStream("deflate"), writer = stream.writable.getWriter();
  const fed = (async () => {
    for (let at = 0; at < text.length; at += 65536) {
      const part = atob(text.slice(at, at + 65536).replace(/-/g, "+").replace(/_/g, "/"));
      const bytes = new Uint8Array(part.length);
      for (let i = 0; i < part.length; i++) bytes[i] = part.charCodeAt(i);
      await writer.write(bytes);
      await rest();
    }
    await writer.close();
  })();
  const parts = [], reader = stream.readable.getReader();
  let size = 0;
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    parts.push(read.value);
    size += read.value.length;
  }
  await fed;
  lines[name] = "";
  const all = new Uint8Array(size);
  let at = 0;
  for (const part of parts) { all.set(part, at); at += part.length; await rest(); }
  return all;
}
async function json(name) {
  const data = await unpack(name);
  await pause();
  return JSON.parse(new TextDecoder().decode(data));
}

let meta, words, contexts, exact, bytes = {}, A = 0, N = 0;
let start, position, sequenceOf, contextAt, exactAt, stats, width;

async function load() {
  lines = {};
  for (const line of packed.map(part => part.textContent).join("").split("\n")) {
    const cut = line.indexOf(" ");
    lines[line.slice(0, cut)] = line.slice(cut + 1);
  }
  for (const part of packed) part.remove();
  await pause();
  meta = await json("meta");
  words = await json("words");
  contexts = await json("contexts");
  exact = await json("exact");
  for (const name of ["word", "delta", "left", "entropy", "reference", "fix", "margin", "layers", "turn"])
    bytes[name] = await unpack(name);
  A = bytes.delta.length;
  N = meta.lengths.length;
  contextAt = new Map(contexts.at.map((row, i) => [row, contexts.of[i]]));
  exactAt = new Map(exact.at.map((row, i) => [row, i]));
  await measure();
}

async function measure() {
  start = new Uint32Array(N + 1);
  position = new Uint32Array(A);
  sequenceOf = new Uint32Array(A);
  stats = { mean: new Float64Array(N), worst: new Float64Array(N), sum: new Float64Array(N) };
  width = 1;
  const scale = meta.scales.delta;
  for (let n = 0, row = 0; n < N; n++) {
    const first = row, end = row + meta.lengths[n];
    let place = meta.starts[n];
    for (; row < end; row++) {
      const context = row > first && contextAt.get(row);
      if (context !== undefined && context !== false) place += contexts.lengths[context];
      position[row] = place++;
      sequenceOf[row] = n;
      const delta = scale[bytes.delta[row]], size = Math.abs(delta);
      stats.mean[n] += size;
      stats.sum[n] += delta;
      if (size > stats.worst[n]) stats.worst[n] = size;
    }
    stats.mean[n] /= meta.lengths[n];
    start[n + 1] = end;
    width = Math.max(width, place);
    await rest();
  }
  const measured = new Float64Array(N);
  exact.at.forEach((row, i) => { measured[sequenceOf[row]] = Math.max(measured[sequenceOf[row]], Math.abs(exact.delta[i])); });
  measured.forEach((size, n) => { if (size > 0.9 * stats.worst[n]) stats.worst[n] = size; });
}

const wordOf = row => bytes.word[row] | bytes.word[A + row] << 8
  | (bytes.word.length > 2 * A ? bytes.word[2 * A + row] << 16 : 0);
const value = (name, row) => bytes[name] && meta.scales[name] ? meta.scales[name][bytes[name][row]] : null;
function best(name, row) {  // [the value, whether it is the measured one]
  const at = exactAt.get(row);
  if (at !== undefined && exact[name]) return [exact[name][at], true];
  return [value(name, row), false];
}
function flipsOf(row) {
  let count = 0;
  for (let at = row; bytes.layers && at < bytes.layers.length; at += A)
    for (let mask = bytes.layers[at]; mask; mask &= mask - 1) count++;
  return count;
}
const flips = (row, place) => bytes.layers[(place >> 3) * A + row] >> (place & 7) & 1;

// ---------------------------------------------------------------- colours

const bands = [Math.log(1.2), Math.log(2), Math.log(5), Math.log(10), Math.log(100)];
let edges = [];  // |delta| from which a token has a colour, five of them
function level(size, from) {
  let at = 0;
  while (at < LEVELS && size >= from[at]) at++;
  return at;
}
const signed = (x, from) => x < 0 ? -level(-x, from) : level(x, from);
const COUNTS = [1, 2, 4, 8, 16], ENTROPY = [0.1, 0.5, 1, 2, 3];
const modes = {
  delta: { label: "Δ, train − rollout", needs: "delta", ends: ["less likely in training", "more likely"],
    of: row => signed(value("delta", row), edges), steps: () => edges.map(x => `${short(x)} nats`) },
  ratio: { label: "ratio, train / rollout", needs: "delta", ends: ["below 1", "above 1"],
    of: row => signed(value("delta", row), bands), steps: () => ["1.2×", "2×", "5×", "10×", "100×"] },
  fix: { label: "Δ after the best fix", needs: "fix", ends: ["less likely in training", "more likely"],
    of: row => signed(value("fix", row), edges), steps: () => edges.map(x => `${short(x)} nats`) },
  cause: { label: "side at fault", needs: "reference", ends: ["train is further from float32", "rollout is"],
    of: row => {
      const delta = value("delta", row), exactly = value("reference", row);
      return Math.sign(Math.abs(exactly) - Math.abs(delta - exactly)) * level(Math.abs(delta), edges);
    }, steps: () => edges.map(x => `${short(x)} nats`) },
  flips: { label: "routing flips", needs: "layers", ends: ["", "flipped layers"],
    of: row => level(flipsOf(row), COUNTS), steps: () => COUNTS.map(String) },
  entropy: { label: "entropy, train", needs: "entropy", ends: ["", "nats"],
    of: row => level(value("entropy", row), ENTROPY), steps: () => ENTROPY.map(String) },
};
let mode = "delta", colours = {};
function readColours() {
  const style = getComputedStyle(root);
  for (const name of ["n1", "n2", "n3", "n4", "n5", "p1", "p2", "p3", "p4", "p5", "none", "given", "rim"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
}
const shade = at => at === 0 ? "none" : (at < 0 ? "n" : "p") + Math.abs(at);
async function chooseEdges() {  // the strongest colour begins where one token in 500 is beyond
  const counts = new Float64Array(128);
  for (let row = 0; row < A; row++) {
    counts[bytes.delta[row] & 127]++;
    if (!(row & 65535)) await rest();
  }
  let code = 127, beyond = 0;
  while (code > 1 && (beyond += counts[code]) < A / 500) code--;
  const top = meta.scales.delta[code] || 1e-4;
  const power = 10 ** Math.floor(Math.log10(top)), digit = top / power;
  const nice = (digit >= 5 ? 5 : digit >= 2 ? 2 : 1) * power;
  edges = [0.03, 0.1, 0.25, 0.5, 1].map(part => part * nice);
}

// ---------------------------------------------------------------- numbers as text

const minus = text => text.replace(/^-/, "−");
function short(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return minus(String(x));
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e-6 && size < 1e5) {
    const text = Number(x.toPrecision(digits)).toString();
    return minus(text);
  }
  return minus(Number(x.toPrecision(digits)).toExponential().replace("e+", "e"));
}
const plus = x => (x > 0 ? "+" : "") + short(x);
const about = ([x, exactly], write = short) => x === null ? "–" : (exactly ? "" : "≈ ") + write(x);
const grouped = n => n.toLocaleString("en-US");

// ---------------------------------------------------------------- which tokens, in which order

let order, matched, matching, hits, run = 0;  // sequences as sorted; a byte per token; rows, largest |delta| first
const asked = { sort: "worst", kind: "", turn: "", layer: "", text: "", regex: false, limits: {} };
const limits = {  // by the name of their field: whether a token, or its whole sequence, fits a number
  least: (x, row) => Math.abs(best("delta", row)[0]) >= x,
  chance: (x, row) => Math.exp(-best("left", row)[0]) <= x,
  from: (x, row, n) => row - start[n] + 1 >= x,
  to: (x, row, n) => row - start[n] + 1 <= x,
  prompt: (x, row, n) => meta.prompts[n] === x,
  reward: (x, row, n) => meta.rewards[n] !== null && meta.rewards[n] <= x,
};
const active = () => Boolean(asked.kind || asked.turn || asked.layer || asked.text || Object.keys(asked.limits).length);
function sortSequences() {
  const keys = {
    worst: n => -stats.worst[n], mean: n => -stats.mean[n], sum: n => -Math.abs(stats.sum[n]),
    length: n => -meta.lengths[n], run: n => meta.numbers[n],
  };
  const key = Float64Array.from({ length: N }, (_, n) => keys[asked.sort](n));
  const all = Uint32Array.from({ length: N }, (_, n) => n);
  order = (active() && matching ? all.filter(n => matching[n]) : all).sort((a, b) => key[a] - key[b] || a - b);
  sheet.style.height = `${order.length * ROW}px`;
}
function pattern() {
  if (!asked.text) return null;
  const source = asked.regex ? asked.text : asked.text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return new RegExp(source, "giu");
}
async function search(n, found, marks) {  // of one sequence's text; matches may span tokens
  let text = "";
  const ends = [];
  for (let row = start[n]; row < start[n + 1]; row++) ends.push((text += words.texts[wordOf(row)]).length);
  let at = 0;
  for (const match of text.matchAll(found)) {
    if (!match[0]) continue;
    const from = match.index, to = from + match[0].length;
    while (ends[at] <= from) at++;
    for (let i = at; i < ends.length && (i === 0 ? 0 : ends[i - 1]) < to; i++) marks[start[n] + i] = 1;
  }
}
async function filter() {
  const mine = ++run;
  let found;
  try {
    found = pattern();
    $("text").removeAttribute("aria-invalid");
  } catch {
    $("text").setAttribute("aria-invalid", "true");
    $("count").textContent = "not a regular expression";
    return;
  }
  const marks = new Uint8Array(A), counts = new Uint32Array(129), holds = new Uint8Array(N);
  const set = Object.entries(asked.limits);
  const kind = words.classes.indexOf(asked.kind), layer = meta.layers.indexOf(Number(asked.layer)), turn = meta.turns.indexOf(Number(asked.turn));
  let total = 0;
  for (let n = 0; n < N; n++) {
    if (found) await search(n, found, marks);
    for (let row = start[n]; row < start[n + 1]; row++) {
      const fits = (!found || marks[row]) && (!asked.kind || words.of[wordOf(row)] === kind)
        && (asked.turn === "" || bytes.turn[row] === turn)
        && (asked.layer === "" || flips(row, layer))
        && set.every(([name, x]) => limits[name](x, row, n));
      marks[row] = fits ? 1 : 0;
      if (fits) { counts[127 - (bytes.delta[row] & 127) + 1]++; total++; holds[n] = 1; }
    }
    await rest();
    if (mine !== run) return;  // something else has been asked for
  }
  for (let i = 1; i < 129; i++) counts[i] += counts[i - 1];
  const rows = new Uint32Array(total);
  for (let row = 0; row < A; row++) {
    if (marks[row]) rows[counts[127 - (bytes.delta[row] & 127)]++] = row;
    if (!(row & 65535)) await rest();
  }
  if (mine !== run) return;
  matched = marks;
  matching = holds;
  await rest();
  const sharp = rows.subarray(0, 2000);  // codes are steps: the first by what was measured
  const size = new Map(Array.from(sharp, row => [row, Math.abs(best("delta", row)[0])]));
  sharp.sort((a, b) => size.get(b) - size.get(a) || a - b);
  hits = rows;
  root.dataset.matches = total;
  await pause();
  sortSequences();
  await drawAll();
}

// ---------------------------------------------------------------- the strips

const pool = new Map(), spare = [];  // strips by their place, and those to be used again
let list, sheet, chosen = -1, drawing = 0, listWidth = 0;
function newStrip() {
  const row = el("div", "", "strip"), canvas = document.createElement("canvas");
  row.setAttribute("role", "option");
  canvas.setAttribute("aria-hidden", "true");
  row.append(el("span", "", "what"), el("span", "", "much"), canvas);
  row.addEventListener("click", () => focusOn(worstOf(Number(row.dataset.n)), true));
  return row;
}
function drop(place) {
  const row = pool.get(place);
  row.remove();
  spare.push(row);
  pool.delete(place);
}
function rowOf(place) {
  const n = order[place], row = spare.pop() || newStrip(), [what, much, canvas] = row.children;
  row.id = `strip-${n}`;
  row.style.top = `${place * ROW}px`;
  const bits = [`sequence ${meta.numbers[n]}`];
  if (meta.prompts) bits.push(`prompt ${meta.prompts[n]}`);
  if (meta.rewards && meta.rewards[n] !== null) bits.push(`reward ${short(meta.rewards[n])}`);
  what.textContent = bits.join(" · ");
  much.textContent = `mean |Δ| ${short(stats.mean[n], 2)}, largest ${short(stats.worst[n], 2)}`;
  row.dataset.n = n;
  paint(canvas, n);
  return row;
}
function paint(canvas, n) {
  const ratio = window.devicePixelRatio || 1, wide = Math.max(50, listWidth - 24), high = 16;
  canvas.width = wide * ratio;
  canvas.height = high * ratio;
  canvas.style.width = `${wide}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const unit = wide / width, most = new Int8Array(Math.ceil(wide) + 1).fill(-99);
  const last = start[n + 1] - 1;
  pen.fillStyle = colours.given;
  pen.fillRect(0, high / 2 - 1, (position[last] + 1) * unit, 2);
  for (let row = start[n]; row <= last; row++) {
    const at = Math.floor(position[row] * unit), end = Math.max(at + 1, Math.floor((position[row] + 1) * unit));
    const here = active() && !matched[row] ? -50 : modes[mode].of(row);
    for (let x = at; x < end; x++) {
      const old = most[x];
      if (old === -99 || old === -50 || (here !== -50 && Math.abs(here) > Math.abs(old))) most[x] = here;
    }
  }
  for (let x = 0; x < most.length; x++) {
    if (most[x] === -99) continue;
    pen.fillStyle = most[x] === -50 ? colours.given : colours[shade(most[x])];
    const tall = most[x] === -50 || most[x] === 0 ? 6 : 6 + 2 * Math.abs(most[x]);  // height says it without colour
    pen.fillRect(x, (high - tall) / 2, 1, tall);
  }
}
function drawStrips(afresh = false) {
  if (afresh) for (const place of [...pool.keys()]) drop(place);
  const top = list.scrollTop, height = list.clientHeight;  // read before anything is written
  listWidth = list.clientWidth;
  const first = Math.max(0, Math.floor(top / ROW) - 2);
  const last = Math.min(order.length - 1, Math.ceil((top + height) / ROW) + 2);
  for (const place of [...pool.keys()]) if (place < first || place > last) drop(place);
  const until = performance.now() + SLICE;
  for (let place = first; place <= last; place++) {
    if (pool.has(place)) continue;
    const row = rowOf(place);
    pool.set(place, row);
    sheet.append(row);
    if (performance.now() > until) { later(); break; }
  }
  for (const row of pool.values()) {
    const is = chosen >= 0 && Number(row.dataset.n) === sequenceOf[chosen];
    row.setAttribute("aria-selected", String(is));
    if (is) list.setAttribute("aria-activedescendant", row.id);
  }
}
function later() {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; drawStrips(); });
}
function worstOf(n) {
  let row = start[n], size = -1;
  for (let at = start[n]; at < start[n + 1]; at++) {
    const here = Math.abs(best("delta", at)[0]) + (active() && matched[at] ? 1e6 : 0);
    if (here > size) { size = here; row = at; }
  }
  return row;
}

// ---------------------------------------------------------------- one sequence's text

let text, block = -1, shownSequence = -1;
function given(context) {
  const kept = contexts.texts[context], gone = contexts.lengths[context] - kept.length;
  const node = el("span", (gone ? `⋯ ${grouped(gone)} tokens ⋯ ` : "") + kept.map(i => words.texts[i]).join(""), "given");
  node.dir = "auto";
  return node;
}
function drawText() {
  const n = sequenceOf[chosen], at = Math.floor((chosen - start[n]) / BLOCK);
  const count = Math.ceil(meta.lengths[n] / BLOCK);
  if (shownSequence === n && block === at) { markChosen(); return; }
  shownSequence = n;
  block = at;
  const from = start[n] + at * BLOCK, to = Math.min(from + BLOCK, start[n + 1]);
  const parts = document.createDocumentFragment();
  for (let row = from; row < to; row++) {
    const context = contextAt.get(row);
    if (context !== undefined) parts.append(given(context));
    const word = words.texts[wordOf(row)], node = el("b", word || "∅");
    node.dataset.row = row;
    node.className = active() && !matched[row] ? "faded" : shade(modes[mode].of(row));
    if (active() && matched[row]) node.classList.add("hit");
    parts.append(node);
    if (word.includes("↵")) parts.append("\n");
  }
  text.replaceChildren(parts);
  $("where").textContent = `Sequence ${meta.numbers[n]}` + (count > 1
    ? `, tokens ${grouped(at * BLOCK + 1)}–${grouped(to - start[n])} of ${grouped(meta.lengths[n])}` : `, ${grouped(meta.lengths[n])} tokens`);
  text.setAttribute("aria-label", `Text of sequence ${meta.numbers[n]}. Left and right arrows move by a token.`);
  $("earlier").disabled = at === 0;
  $("later").disabled = at === count - 1;
  markChosen();
}
function markChosen() {
  const before = text.querySelector("[aria-current]"), now = text.querySelector(`[data-row="${chosen}"]`);
  if (before) before.removeAttribute("aria-current");
  if (!now) return;
  now.setAttribute("aria-current", "true");
  const top = now.offsetTop - text.offsetTop;
  if (top < text.scrollTop + 20 || top > text.scrollTop + text.clientHeight - 50) text.scrollTop = top - text.clientHeight / 3;
}

// ---------------------------------------------------------------- one token

function drawCard() {
  const row = chosen, n = sequenceOf[row], card = $("card"), facts = el("dl");
  const fact = (name, text) => { facts.append(el("dt", name), el("dd", text)); };
  const delta = best("delta", row), left = best("left", row).slice();
  left[0] = -left[0];
  const chance = ([x, exactly]) => `${about([x, exactly])}  (p ${x > -1e-3 ? "> 0.999" : short(Math.exp(x))})`;
  const top = exact.top && exact.top[row], brief = root.classList.contains("compact");
  if (top && brief) fact("likeliest", `${first(top, 1)} in the rollout, ${first(top, 2)} in training`);
  fact("rollout logprob", chance(left));
  fact("train logprob", chance([Math.min(0, left[0] + delta[0]), delta[1]]));
  fact("Δ, ratio", `${about(delta, plus)} nats, ${short(Math.exp(delta[0]))}×`);
  for (const [name, label] of [["reference", "float32 logprob"], ["fix", `with ${meta.fix}`]]) {
    if (!meta.has.includes(name)) continue;
    const [x, exactly] = best(name, row);
    fact(label, x === null ? "not kept for this token" : `${about([left[0] + x, exactly])}  (Δ ${plus(x)})`);
  }
  if (meta.has.includes("entropy")) fact("train entropy", bytes.entropy || best("entropy", row)[1] ? `${about(best("entropy", row))} nats` : "not kept for this token");
  if (bytes.layers) {
    const which = meta.layers.filter((_, place) => flips(row, place));
    fact("flipped layers", which.length ? which.join(", ") : "none");
  }
  if (meta.has.includes("margin") && best("margin", row)[0] !== null) fact("smallest router margin", about(best("margin", row)));
  if (meta.rewards && meta.rewards[n] !== null) fact("reward", short(meta.rewards[n]));
  const kind = words.of[wordOf(row)];
  const title = el("p", "", "token");
  const name = el("bdi", words.texts[wordOf(row)] || "(empty)");
  title.append(name);
  const place = `token ${grouped(row - start[n] + 1)} of ${grouped(meta.lengths[n])}`;
  const bits = [`sequence ${meta.numbers[n]}, ${place}${brief ? "" : ` (position ${position[row]} with the prompt)`}`];
  if (meta.prompts && !brief) bits.push(`prompt ${meta.prompts[n]}` + (meta.samples ? `, sample ${meta.samples[n]}` : ""));
  if (bytes.turn) bits.push(`turn ${meta.turns[bytes.turn[row]]}`);
  if (kind >= 0) bits.push(words.classes[kind]);
  const parts = [title, el("p", bits.join(" · "), "faint"), facts];
  parts.push(top ? likeliest(top, wordOf(row)) : el("p", "What is likeliest here was not kept: see the note below.", "faint"));
  card.replaceChildren(...parts);
}
function outcome(x) {  // thousandths, so that a column reads alike
  if (x === null) return "0";
  const p = Math.exp(x < 1 ? x : 1 - x), known = x < 1 && p >= 1e-3;
  return known ? p.toFixed(3) : `< ${Math.max(1e-3, x < 1 ? 0 : p).toFixed(3)}`;
}
function first(top, side) {  // the token that a side thinks likeliest, and its probability
  const known = top.filter(each => each[side] !== null && each[side] < 1);
  if (!known.length) return "not kept";
  const [word, ...sides] = known.reduce((a, b) => b[side] > a[side] ? b : a);
  return `${JSON.stringify(words.texts[word])} ${outcome(sides[side - 1])}`;
}
function likeliest(top, own) {
  const table = el("table"), head = el("tr"), body = el("tbody"), group = el("thead");
  table.append(el("caption", "Likeliest tokens here: probability on either side"));
  for (const title of ["token", "rollout", "train"]) {
    const cell = el("th", title);
    cell.scope = "col";
    head.append(cell);
  }
  for (const [word, ...sides] of top) {
    const row = el("tr", "", word === own ? "own" : ""), first = el("th");
    first.scope = "row";
    first.append(el("bdi", words.texts[word]));
    row.append(first, ...sides.map(x => el("td", outcome(x))));
    body.append(row);
  }
  group.append(head);
  table.append(group, body);
  return table;
}

// ---------------------------------------------------------------- taking it along

const AROUND = 30;  // tokens on either side of one that is copied
function record(row) {
  const n = sequenceOf[row], left = -best("left", row)[0], delta = best("delta", row)[0];
  return { sequence: meta.numbers[n], token: row - start[n] + 1, position: position[row], text: words.texts[wordOf(row)],
    rollout_logprob: left, train_logprob: left + delta, delta, turn: bytes.turn ? meta.turns[bytes.turn[row]] : null,
    prompt: meta.prompts ? meta.prompts[n] : null, reward: meta.rewards ? meta.rewards[n] : null };
}
function copyToken() {
  const n = sequenceOf[chosen], said = (from, to) => Array.from({ length: to - from }, (_, i) => words.texts[wordOf(from + i)]).join("");
  const around = { before: said(Math.max(start[n], chosen - AROUND), chosen), after: said(chosen + 1, Math.min(start[n + 1], chosen + 1 + AROUND)) };
  navigator.clipboard.writeText(JSON.stringify({ ...record(chosen), ...around }, null, 1)).then(
    () => { $("count").textContent = "copied, with the text around it"; }, () => { $("count").textContent = "this browser lets no page copy"; });
}
function exportRows() {  // text as JSON: a cell that begins with "=" would be computed
  const cell = x => typeof x === "string" ? `"${JSON.stringify(x).replace(/"/g, '""')}"` : x === null ? "" : String(x);
  const rows = Array.from(hits, record), names = Object.keys(record(chosen));
  const lines = [names.join(","), ...rows.map(row => names.map(name => cell(row[name])).join(","))];
  const link = el("a");
  link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
  link.download = "tokens.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ---------------------------------------------------------------- moving about

function focusOn(row, link = false) {
  chosen = row;
  const n = sequenceOf[row], place = order.indexOf(n), top = place * ROW;
  if (place >= 0 && (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight)) list.scrollTop = top - list.clientHeight / 3;
  drawStrips();
  drawText();
  drawCard();
  drawCount();
  root.dataset.token = `s${meta.numbers[n]}t${position[row]}`;
  if (link) try { history.replaceState(null, "", `#${root.dataset.token}`); } catch { /* an odd place to open it from */ }
}
function whole() {
  root.classList.remove("compact");
  drawAll();
}
function followLink() {  // #s12t340 is a token; #tokens&kind=digit&least=0.7 sets these controls
  if (location.hash.startsWith("#tokens&")) {
    for (const [name, value] of new URLSearchParams(location.hash.slice(8)))
      if (["kind", "turn", "layer", "text", ...Object.keys(limits)].includes(name)) {
        $(name).value = value;
        for (const event of ["input", "change"]) $(name).dispatchEvent(new Event(event));
      }
    whole();
    root.scrollIntoView();
    return true;
  }
  const found = /^#s(\d+)t(\d+)$/.exec(location.hash);
  if (!found) return false;
  const n = meta.numbers.indexOf(Number(found[1]));
  if (n < 0) { $("count").textContent = `Sequence ${found[1]} is not in this page.`; return false; }
  let row = start[n];
  while (row < start[n + 1] - 1 && position[row] < Number(found[2])) row++;
  focusOn(row);
  root.scrollIntoView();
  return true;
}
function step(by) {  // to the next or previous match, the largest |delta| first
  if (!hits || !hits.length) return;
  const at = hits.indexOf(chosen);
  focusOn(hits[Math.min(hits.length - 1, Math.max(0, at < 0 ? 0 : at + by))], true);
}
function move(by) {
  const n = sequenceOf[chosen];
  focusOn(Math.min(start[n + 1] - 1, Math.max(start[n], chosen + by)), true);
}
function moveSequence(by) {
  const place = order.indexOf(sequenceOf[chosen]) + by;
  if (place >= 0 && place < order.length) focusOn(worstOf(order[place]), true);
}
const keys = { j: () => step(1), k: () => step(-1), ArrowRight: () => move(1), ArrowLeft: () => move(-1),
  ArrowDown: () => moveSequence(1), ArrowUp: () => moveSequence(-1) };
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (!keys[event.key] || chosen < 0) return;
  event.preventDefault();
  keys[event.key]();
}

// ---------------------------------------------------------------- the controls

function drawCount() {
  const place = hits.indexOf(chosen);
  if (root.classList.contains("compact") && place === 0) $("count").textContent = "The token of largest |Δ|, in its sequence";
  else $("count").textContent = `${grouped(hits.length)} of ${grouped(A)} tokens${active() ? " match" : ""}`
    + (place >= 0 ? `; this is ${active() ? "match" : "number"} ${grouped(place + 1)} by |Δ|` : "");
}
function drawLegend() {
  const legend = $("legend"), steps = modes[mode].steps(), ends = modes[mode].ends;
  const chip = (name, text) => { const node = el("span", text, `chip ${name}`); return node; };
  legend.replaceChildren();
  if (ends[0]) {
    legend.append(el("span", ends[0]));
    for (let at = LEVELS; at; at--) legend.append(chip(`n${at}`, at === LEVELS ? `≥ ${steps[at - 1]}` : ""));
  }
  for (let at = 1; at <= LEVELS; at++) legend.append(chip(`p${at}`, at === 1 || at === LEVELS || !ends[0] ? `≥ ${steps[at - 1]}` : ""));
  legend.append(el("span", ends[1]));
}
async function drawAll() {
  shownSequence = -1;
  if (active() && hits.length && !matched[chosen]) chosen = hits[0];
  if (chosen < 0) chosen = hits.length ? hits[0] : 0;
  drawStrips(true);
  await pause();
  focusOn(chosen);
}
function options(select, pairs) {
  for (const [key, label] of pairs) {
    const option = el("option", label);
    option.value = key;
    select.append(option);
  }
  if (select.options.length < 2) select.closest("label").hidden = true;
}
function controls() {
  options($("mode"), Object.entries(modes).filter(([, m]) => bytes[m.needs]).map(([key, m]) => [key, m.label]));
  options($("kind"), [["", "all"], ...words.classes.map(name => [name, name])]);
  options($("turn"), [["", "all"], ...(bytes.turn ? meta.turns : []).map(turn => [String(turn), String(turn)])]);
  options($("layer"), [["", "any"], ...(bytes.layers ? meta.layers : []).map(layer => [String(layer), String(layer)])]);
  const wait = { id: 0 };
  const changed = () => {
    clearTimeout(wait.id);
    wait.id = setTimeout(() => { root.dataset.ready = "no"; filter().then(() => { root.dataset.ready = "yes"; }); }, 120);
  };
  $("mode").addEventListener("change", event => { mode = event.target.value; drawLegend(); drawAll(); });
  $("sort").addEventListener("change", event => { asked.sort = event.target.value; sortSequences(); list.scrollTop = 0; drawAll(); });
  $("kind").addEventListener("change", event => { asked.kind = event.target.value; changed(); });
  for (const name of ["turn", "layer"])
    $(name).addEventListener("change", event => { asked[name] = event.target.value; changed(); });
  for (const name in limits) {
    $(name).closest("label").hidden = name === "prompt" && !meta.prompts || name === "reward" && !meta.rewards;
    $(name).addEventListener("input", event => {
      if (Number.isFinite(event.target.valueAsNumber)) asked.limits[name] = event.target.valueAsNumber;
      else delete asked.limits[name];
      changed();
    });
  }
  $("more").addEventListener("click", whole);
  $("copy").addEventListener("click", copyToken);
  $("export").addEventListener("click", exportRows);
  $("text").addEventListener("input", event => { asked.text = event.target.value; changed(); });
  $("regex").addEventListener("change", event => { asked.regex = event.target.checked; changed(); });
  $("next").addEventListener("click", () => step(1));
  $("previous").addEventListener("click", () => step(-1));
  $("earlier").addEventListener("click", () => move(-BLOCK));
  $("later").addEventListener("click", () => move(BLOCK));
  list.addEventListener("scroll", later, { passive: true });
  text.addEventListener("click", event => {
    const node = event.target.closest("[data-row]");
    if (node) focusOn(Number(node.dataset.row), true);
  });
  $("live").addEventListener("keydown", onKey);
  window.addEventListener("hashchange", followLink);
  const again = () => { readColours(); drawStrips(true); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let wide = list.clientWidth;
  new ResizeObserver(() => {
    if (list.clientWidth !== wide) drawStrips(true);
    wide = list.clientWidth;
    later();
  }).observe(list);
}

async function begin() {
  root.closest("details")?.setAttribute("open", "");  // a link leads into it
  if (begin.begun) return;
  begin.begun = true;
  root.classList.add("on");
  try {
    await load();
    list = $("list");
    sheet = $("sheet");
    text = $("body");
    await chooseEdges();
    await pause();
    readColours();
    sortSequences();
    controls();
    drawLegend();
    $("live").hidden = false;
    await pause();
    await filter();
    followLink();
    root.dataset.ready = "yes";
  } catch (error) {
    root.classList.remove("on");  // the table is still there
    root.dataset.ready = "failed";
    throw error;
  }
}
const soon = () => requestAnimationFrame(() => setTimeout(begin, 0));  // after the page is painted
const LINK = /^#(s\d+t\d+$|tokens&)/;
if (root.classList.contains("compact")) root.classList.add("on");  // room, while it is unpacked
if (LINK.test(location.hash) || root.classList.contains("compact")) soon();
else new IntersectionObserver(seen => { if (seen.some(one => one.isIntersecting)) soon(); }, { rootMargin: "600px" }).observe(root);
window.addEventListener("hashchange", () => { if (LINK.test(location.hash)) soon(); });
})();

"use strict";
// Heatmaps over any two settings, and a runs table that sorts, filters and turns pages. Text is only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);

function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

// ---- heatmaps -------------------------------------------------------------------------------------------------------
const map = data.map;
const axis = (key) => map.axes.find((a) => a.key === key) || { key: "", title: "", values: ["all"], of: null };
const at = (a, run) => (a.of ? a.of[run] : 0);
const state = { scope: map.start.scope, x: map.start.x, y: map.start.y, fixed: { ...map.start.fixed } };

// A setting of the workload (model, sequence, GPUs) that is on no axis is held at one value: unlike runs never share a map.
function held(runs) {
  return map.axes.filter((a) => a.fixed && a.key !== state.x && a.key !== state.y && new Set(runs.map((r) => at(a, r))).size > 1);
}

function members() {
  let runs = map.scope.flatMap((s, run) => (s === state.scope ? [run] : []));
  const scoped = runs;
  for (const a of held(scoped)) {
    if (!scoped.some((r) => at(a, r) === state.fixed[a.key])) state.fixed[a.key] = at(a, scoped[0]);
    const kept = runs.filter((r) => at(a, r) === state.fixed[a.key]);
    if (!kept.length) state.fixed[a.key] = at(a, runs[0]);
    runs = runs.filter((r) => at(a, r) === state.fixed[a.key]);
  }
  return [runs, scoped];
}

// The rest of the winning configuration: of mesh and recipe what not all runs of the map share, of the others what the
// cell could choose from.
function winner(run, runs, all) {
  const parts = (a, r) => a.values[at(a, r)].split(" · ");
  const told = map.axes.filter((a) => a.detail && a.key !== state.x && a.key !== state.y);
  return told.flatMap((a) => {
    if (a.joined) return parts(a, run).filter((p) => p !== "plain" && !all.every((r) => parts(a, r).includes(p)));
    return runs.some((r) => at(a, r) !== at(a, run)) ? [`${a.title} ${a.values[at(a, run)]}`] : [];
  }).join(" · ");
}

function cell(runs, all, figure, low, high, top) {
  const td = el("td");
  const scored = runs.filter((r) => figure.value[r] !== null);
  if (!scored.length) {
    const states = [...new Set(runs.map((r) => map.status[r]))];
    td.className = "failed";
    td.append(states.join(", "));
    if (runs.length > 1) td.append(el("small", { textContent: `${runs.length} runs` }));
    td.dataset.run = map.id[runs[0]];
    return td;
  }
  const best = scored.reduce((a, b) => (figure.sign * figure.value[b] > figure.sign * figure.value[a] ? b : a));
  const step = high > low ? Math.round(((figure.value[best] - low) / (high - low)) * (map.steps - 1)) : map.steps >> 1;
  td.className = `h${step}` + (best === top ? " best" : "");
  td.dataset.run = map.id[best];
  td.append(el("b", { textContent: figure.text[best] }));
  if (map.simulated[best]) td.append(" ", el("span", { className: "sim", textContent: "sim" }));
  const lost = runs.filter((r) => map.status[r] !== "ok").length;
  for (const text of [winner(best, runs, all), lost ? `${lost} of ${runs.length} failed` : ""]) if (text) td.append(el("small", { textContent: text }));
  return td;
}

function draw(figure, runs) {
  const [x, y] = [axis(state.x), axis(state.y)];
  const cells = new Map();
  for (const r of runs) {
    const key = `${at(x, r)} ${at(y, r)}`;
    cells.set(key, [...(cells.get(key) || []), r]);
  }
  const present = (a) => [...new Set(runs.map((r) => at(a, r)))].sort((i, j) => i - j);
  const best = [...cells.values()].map((rs) => rs.filter((r) => figure.value[r] !== null)).filter((rs) => rs.length)
    .map((rs) => rs.reduce((a, b) => (figure.sign * figure.value[b] > figure.sign * figure.value[a] ? b : a)));
  const values = best.map((r) => figure.value[r]);
  const top = best.reduce((a, b) => (a === null || figure.sign * figure.value[b] > figure.sign * figure.value[a] ? b : a), null);
  const head = el("tr", {}, el("th", { textContent: [y.title, x.title].filter(Boolean).join(" \\ ") }), ...present(x).map((i) => el("th", { textContent: x.values[i], scope: "col" })));
  const body = present(y).map((j) => el("tr", {}, el("th", { textContent: y.values[j], scope: "row" }), ...present(x).map((i) => {
    const rs = cells.get(`${i} ${j}`);
    return rs ? cell(rs, runs, figure, Math.min(...values), Math.max(...values), top) : el("td");
  })));
  return el("table", { className: "heat" }, el("thead", {}, head), el("tbody", {}, ...body));
}

function choice(label, id, options, value, change) {
  const select = el("select", { id });
  for (const [v, text] of options) select.append(el("option", { value: v, textContent: text, selected: String(v) === String(value) }));
  select.addEventListener("change", () => { change(select.value); render(); });
  return el("label", {}, label, select);
}

function render() {
  const [runs, scoped] = members();
  const open = map.axes.filter((a) => new Set(scoped.map((r) => at(a, r))).size > 1 || a.key === state.x || a.key === state.y);
  const names = [["", "none"], ...open.map((a) => [a.key, a.title])];
  const controls = [choice("columns", "axis-x", names, state.x, (v) => { state.x = v; }), choice("rows", "axis-y", names, state.y, (v) => { state.y = v; })];
  if (map.scopes.length > 1) controls.unshift(choice("runs", "scope", map.scopes.map((t, i) => [i, t]), state.scope, (v) => { state.scope = Number(v); }));
  for (const a of held(scoped)) {
    const values = [...new Set(scoped.map((r) => at(a, r)))].sort((i, j) => i - j);
    controls.push(choice(a.title, `held-${a.key}`, values.map((i) => [i, a.values[i]]), state.fixed[a.key], (v) => { state.fixed[a.key] = Number(v); }));
  }
  $("#map-controls").replaceChildren(...controls);
  for (const figure of map.figures) $(`#map-${figure.key}`).replaceChildren(draw(figure, runs));
}

// ---- runs -----------------------------------------------------------------------------------------------------------
const PAGE = 100;
const body = $("#runs tbody");
const rows = body ? [...body.rows] : [];
const index = new Map(rows.map((row, i) => [row, i]));
let order = rows.slice();
let shown = rows;
let page = 0;
let texts = null;

function compare(values, sign) {
  const missing = (v) => v === null || v === undefined || v === "";
  return (a, b) => {
    const [u, v] = [values[index.get(a)], values[index.get(b)]];
    if (missing(u) || missing(v)) return missing(u) - missing(v);
    return sign * (typeof u === "number" ? u - v : String(u).localeCompare(String(v), undefined, { numeric: true }));
  };
}

function turn(to) {
  page = Math.max(0, Math.min(to, Math.ceil(shown.length / PAGE) - 1));
  const visible = new Set(shown.slice(page * PAGE, (page + 1) * PAGE));
  for (const row of rows) if (row.hidden === visible.has(row)) row.hidden = !visible.has(row);
  const first = shown.length ? page * PAGE + 1 : 0;
  $("#count").textContent = `${first.toLocaleString("en")}–${Math.min((page + 1) * PAGE, shown.length).toLocaleString("en")} of ${shown.length.toLocaleString("en")}` +
    (shown.length < rows.length ? ` (${rows.length.toLocaleString("en")} in all)` : "");
  $("#previous").disabled = page === 0;
  $("#next").disabled = (page + 1) * PAGE >= shown.length;
}

function filter() {
  texts ||= rows.map((row) => `${row.dataset.runId} ${row.dataset.engine} ${row.textContent}`.toLowerCase());
  const words = [...$("#filter").value.toLowerCase().matchAll(/"([^"]+)"|[^\s"]+/g)].map((m) => m[1] || m[0]);
  shown = order.filter((row) => words.every((word) => texts[index.get(row)].includes(word)));
  turn(0);
}

function sort(th) {
  const falling = th.getAttribute("aria-sort") ? th.getAttribute("aria-sort") === "ascending" : th.classList.contains("num");
  for (const other of body.parentNode.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", falling ? "descending" : "ascending");
  order = rows.slice().sort(compare(data.sort[th.dataset.sort], falling ? -1 : 1));
  body.append(...order);
  filter();
}

async function copy(button) {
  const code = button.parentNode.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "selected";
  }
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copy(button);
  const mapped = event.target.closest("td[data-run]");
  const wanted = mapped ? mapped.dataset.run : event.target.closest("a[data-find]")?.dataset.find;
  if (wanted && body) {
    $("#filter").value = wanted;
    filter();
    $("#runs").scrollIntoView();
  }
});

if (map.id.length) render();
if (body) {
  for (const th of body.parentNode.querySelectorAll("th[data-sort]")) th.addEventListener("click", () => sort(th));
  $("#filter").addEventListener("input", filter);
  $("#previous").addEventListener("click", () => turn(page - 1));
  $("#next").addEventListener("click", () => turn(page + 1));
  turn(0);
}

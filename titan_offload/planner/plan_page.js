// What moves on a plan's page: controls, timelines, tables. The figures: plan_page_formulas.js.

const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);

const OWN = "own";  // the link whose speed the slider sets
const SCHEDULES = { sync: "Synchronous", overlap: "Overlapped" };
const LANES = { compute: "compute", d2h: "D2H", h2d: "H2D" };
const KINDS = {
  forward: "forward", recompute: "recompute", backward: "backward", offload: "offload (D2H)", reload: "reload (H2D)",
  wait: "compute waits for a copy",
};
const VARIANTS = {
  ac: "recompute alone (AC)",
  sync: "offload, synchronous",
  overlap: "offload, overlapped",
  overlap_selective_device: "overlapped, attention saved on the device",
  overlap_selective_host: "overlapped, attention saved in host memory",
  all_without_ac: "everything offloaded, no recompute",
};

const GIB = 2 ** 30;
const asked = { model: 0, link: data.links[0].key, seq: data.job.seq_len, share: data.machine.devices_per_link };

let state;  // what the controls say
let plan;  // what follows from it


// Words. A number that is not known is a dash.

const number = (value, digits) => value === null || value === undefined ? "–"
  : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const count = (value) => number(value, 0);
const ms = (value) => number(value, value >= 1e4 ? 1 : value >= 1e3 ? 2 : 4);
const percent = (value) => number(value, 2);
const gib = (value) => number(value, 2);
const ratio = (value) => number(value, 4);
const blocks = (first, num) => num === 1 ? `block ${first}` : `blocks ${first} to ${first + num - 1}`;


// Elements

function element(name, attributes = {}, ...children) {
  const isSvg = ["g", "line", "path", "rect", "svg", "text", "title"].includes(name);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// columns: [heading, how a row's cell reads]; the first is the row's heading.
function fillTable(id, columns, rows, planned = () => false) {
  const head = element("tr", { role: "row" });
  for (const [heading] of columns) head.append(element("th", { scope: "col", role: "columnheader" }, heading));
  const body = rows.map((row) => {
    const line = element("tr", { role: "row", ...(planned(row) ? { class: "planned" } : {}) });
    columns.forEach(([heading, read], index) => {
      const text = read(row);
      const cell = text instanceof Node ? text : document.createTextNode(text);
      line.append(index ? element("td", { role: "cell", "data-label": heading }, element("span", {}, cell))
        : element("th", { scope: "row", role: "rowheader" }, cell));
    });
    return line;
  });
  by(id).setAttribute("role", "table");
  by(id).replaceChildren(
    element("thead", { role: "rowgroup" }, head), element("tbody", { role: "rowgroup" }, ...body));
}


// The two timelines

const FONT = 12, LANE_HEIGHT = 26, LANE_GAP = 8, AXIS_HEIGHT = 36, LABEL_WIDTH = 64;

function barsOf(line, lane) {
  const bars = [];
  let end = 0;
  for (const { name, start_ms, end_ms } of line.filter((interval) => interval.lane === lane)) {
    if (lane === "compute" && start_ms - end > 1e-9 * end_ms)
      bars.push({ kind: "wait", block: "", start: end, end: start_ms });
    const [kind, block] = name.split(" ");
    bars.push({ kind, block, start: start_ms, end: end_ms });
    end = end_ms;
  }
  return bars;
}

function drawTimeline(svg, line, last) {
  const width = svg.parentElement.clientWidth;
  const height = 3 * (LANE_HEIGHT + LANE_GAP) + AXIS_HEIGHT;
  const x = (time) => LABEL_WIDTH + time / last * (width - LABEL_WIDTH - 12);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren(...axis(x, last, height - AXIS_HEIGHT, width));
  Object.entries(LANES).forEach(([lane, words], row) => {
    const top = row * (LANE_HEIGHT + LANE_GAP) + LANE_GAP / 2;
    const label = element("text", { x: 0, y: top + LANE_HEIGHT / 2 + FONT / 3 }, words);
    svg.append(label, ...drawBars(barsOf(line, lane), x, top));
  });
}

function drawBars(bars, x, top) {
  return bars.flatMap((bar, index) => {
    const left = x(bar.start), right = x(bar.end);
    const title = `${bar.kind} ${bar.block}: ${ms(bar.start)} to ${ms(bar.end)} ms`;
    const gap = right - left > 3 ? 0.5 : 0;  // bars that touch are told apart
    const size = { width: Math.max(right - left - gap, 1), height: LANE_HEIGHT };
    const rect = element("rect", { class: bar.kind, x: left, y: top, ...size }, element("title", {}, title));
    const room = FONT * 0.62 * bar.block.length + 4;
    const next = index + 1 < bars.length ? x(bars[index + 1].start) : Infinity;
    const y = top + LANE_HEIGHT / 2 + FONT / 3;
    if (bar.block && right - left >= room)
      return [rect, element("text", { class: `in-bar on-${bar.kind}`, x: (left + right) / 2, y }, bar.block)];
    if (bar.block && next - right >= room && ["offload", "reload"].includes(bar.kind))
      return [rect, element("text", { x: right + 2, y }, bar.block)];
    return [rect];
  });
}

function axis(x, last, bottom, width) {
  const wanted = last / Math.max(2, (width - LABEL_WIDTH) / 60);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= wanted);
  const ticks = Array.from({ length: Math.floor(last / step + 1e-9) + 1 }, (_, index) => index * step);
  const middle = (at, y, text) => element("text", { x: at, y, "text-anchor": "middle" }, text);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return [
    ...ticks.map((tick) => element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: bottom })),
    element("line", { class: "axis", x1: x(0), x2: x(last), y1: bottom, y2: bottom }),
    ...ticks.map((tick) => middle(x(tick), bottom + FONT + 4, number(tick, digits))),
    middle(x(last / 2), bottom + 2 * FONT + 8, "time (ms)"),
  ];
}

function drawTimelines() {
  const endOf = (line) => largest(line.map((i) => i.end_ms));
  const last = largest(Object.values(plan.timelines).map(endOf));
  const drawn = new Set(plan.timelines.sync.map((interval) => interval.name.split(" ")[1])).size;
  const total = plan.model.num_layers;
  const what = drawn === total ? `all ${total} blocks` : `${drawn} of the ${total} blocks`;
  for (const [name, words] of Object.entries(SCHEDULES)) {
    const passMs = endOf(plan.timelines[name].filter((i) => i.lane === "compute"));  // copies may end later
    by(`${name}-title`).textContent = `${words}, forward and backward of ${what}: ${ms(passMs)} ms`;
    drawTimeline(by(name), plan.timelines[name], last);
  }
}

function fillLegend() {
  by("legend").replaceChildren(...Object.entries(KINDS).map(([kind, words]) => element("li", {},
    element("svg", { width: 18, height: 12, "aria-hidden": "true" },
      element("rect", { class: kind, width: 18, height: 12 })),
    words)));
}


// Controls. The address says all of them, so that a setting can be handed on.

const nearest = (stops, value) => stops.reduce(
  (best, stop, index) => Math.abs(Math.log(stop / value)) < Math.abs(Math.log(stops[best] / value)) ? index : best, 0);

function linkOf({ link, rate }) {
  return data.links.find(({ key }) => key === link) ?? { key: OWN, d2h_gb_per_s: rate, h2d_gb_per_s: rate };
}

function rateText({ d2h_gb_per_s: out, h2d_gb_per_s: back }) {
  const text = (rate) => rate.toLocaleString("en", { maximumFractionDigits: 2 });
  return out === back ? `${text(out)} GB/s` : `${text(out)} out, ${text(back)} back, GB/s`;
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const pick = (key, allowed, otherwise) => allowed(asked.get(key)) ? asked.get(key) : otherwise;
  const isAmount = (text) => Number(text) > 0 && Number(text) < Infinity;
  const { seq_len, devices_per_link } = { ...data.job, ...data.machine };
  const link = pick("link", (key) => key === OWN || data.links.some((known) => known.key === key), data.links[0].key);
  const rate = link === OWN
    ? data.rate_stops[nearest(data.rate_stops, Number(pick("rate", isAmount, data.links[0].d2h_gb_per_s)))] : undefined;
  return {
    model: Number(pick("model", (text) => text !== null && text.trim() !== "" && Number(text) in data.models, 0)),
    link,
    rate,
    seq: data.seq_stops[nearest(data.seq_stops, Number(pick("seq", isAmount, seq_len)))],
    share: Math.min(data.machine.devices_per_node, Math.ceil(Number(pick("share", isAmount, devices_per_link)))),
  };
}

function toAddress() {
  const said = new URLSearchParams({ model: state.model, link: state.link, seq: state.seq, share: state.share });
  if (state.link === OWN) said.set("rate", state.rate);
  history.replaceState(null, "", `#${said}`);
}

function fillControls() {
  by("model").append(...data.models.map(({ name }, index) => element("option", { value: index }, name)));
  by("link").append(...data.links.map((link) =>
    element("option", { value: link.key }, `${link.name}, ${rateText(link)}`)));
  by("link").append(element("option", { value: OWN }, "own speed, set below"));
  by("rate").max = data.rate_stops.length - 1;
  by("seq").max = data.seq_stops.length - 1;
  by("share").max = data.machine.devices_per_node;
  const listen = (id, change) => by(id).addEventListener("input", (event) => {
    state = { ...state, ...change(event.target.value) };
    toAddress();
    show();
  });
  listen("model", (value) => ({ model: Number(value) }));
  listen("link", (value) => ({ link: value, rate: value === OWN ? data.rate_stops[by("rate").value] : undefined }));
  listen("rate", (value) => ({ link: OWN, rate: data.rate_stops[value] }));
  listen("seq", (value) => ({ seq: data.seq_stops[value] }));
  listen("share", (value) => ({ share: Number(value) }));
  addEventListener("hashchange", () => {
    state = fromAddress();
    show();
  });
}

function setSlider(id, position, text) {
  by(id).value = position;
  by(id).setAttribute("aria-valuetext", text);
  by(`${id}-value`).textContent = text;
}

function showControls(link) {
  by("model").value = state.model;
  by("link").value = state.link;
  setSlider("rate", nearest(data.rate_stops, Math.min(link.d2h_gb_per_s, link.h2d_gb_per_s)), rateText(link));
  setSlider("seq", data.seq_stops.indexOf(state.seq), `${count(state.seq)} tokens`);
  setSlider("share", state.share, count(state.share));
}


// What follows from them

const planned = data.variant === "ac" ? "overlap" : data.variant;  // where nothing was to move: what moving would do

const movesAll = planned === "all_without_ac";

const fitsHost = (step) => data.host_budget_bytes === null ? null : step.pinned_node_bytes <= data.host_budget_bytes;

function fitsDevice(step) {
  const memory = data.machine.device_memory_gib;
  return memory === null ? null : step.peak.num_bytes <= memory * GIB;
}

function fitsText(step) {
  const words = { host: fitsHost(step), device: fitsDevice(step) };
  const parts = Object.entries(words).filter(([, fits]) => fits !== null).map(([where, fits]) =>
    element("span", { class: fits ? "good" : "bad" }, `${where}: ${fits ? "yes" : "no"}`));
  if (!parts.length) return "not known";
  return element("span", {}, ...parts.flatMap((part, index) => index ? [", ", part] : [part]));
}

function showVerdict() {
  const { ac, sync, [planned]: step } = plan.steps, memory = data.machine.device_memory_gib;
  const host = fitsHost(step), device = fitsDevice(step);
  const answer = (fits, where, limit) => element("span", { class: fits ? "good" : "bad" },
    `${fits ? "Fits" : "Does not fit"} the ${where} (${gib(limit / GIB)} GiB). `);
  const how = step.vs_ac_percent < 0 ? "less" : "more";
  const slower = `The step takes ${percent(Math.abs(step.vs_ac_percent))} % ${how} than with recompute alone`
    + (movesAll ? "." : `; with synchronous copies ${percent(sync.vs_ac_percent)} % more.`);
  const head = element("p", {});
  if (host !== null) head.append(answer(host, "host", data.host_budget_bytes));
  if (device !== null) head.append(answer(device, "device", memory * GIB));
  head.append(slower);
  const parts = Object.entries(step.peak.parts_bytes).sort((one, other) => other[1] - one[1]);
  by("verdict").replaceChildren(
    head,
    element("p", {}, `Pinned host memory: ${gib(step.pinned_bytes / GIB)} GiB per rank, `
      + `${gib(step.pinned_node_bytes / GIB)} GiB per node.`),
    element("p", {}, `On the device after forward: ${gib(step.held_bytes / GIB)} GiB of `
      + `${movesAll ? "activations" : "block inputs and saved outputs"}, with recompute alone `
      + `${gib(ac.held_bytes / GIB)} GiB. The peak, as far as it is known: ${gib(step.peak.num_bytes / GIB)} GiB, `
      + `with recompute alone ${gib(ac.peak.num_bytes / GIB)} GiB (${step.peak.name}: `
      + `${parts.map(([what, bytes]) => `${gib(bytes / GIB)} of ${what}`).join(", ")}).`));
}

function showSettings() {
  const isAsked = JSON.stringify(state) === JSON.stringify(asked);
  const lines = data.verdict.settings.map(({ key, value, why }) => element("p", {},
    element("code", {}, `${key} = ${JSON.stringify(value)}`), element("span", { class: "soft" }, why)));
  by("settings").replaceChildren(
    element("p", { class: "soft" }, isAsked ? "Keys to set:"
      : "Keys to set for what was asked about, which the controls no longer show:"),
    ...lines,
    element("p", { class: "soft" }, `Not counted: ${data.verdict.unknown.join("; ")}.`));
}

function showTables() {
  fillTable("layers", [
    ["blocks", (layer) => blocks(layer.first, layer.count)],
    ["forward (ms)", (layer) => ms(layer.forward_ms)],
    ["of it attention (ms)", (layer) => ms(layer.attention_ms)],
    ["copy to the host (ms)", (layer) => ms(layer.d2h_ms)],
    ["copy back (ms)", (layer) => ms(layer.h2d_ms)],
    ["copy / forward", (layer) => ratio(layer.copy_over_forward)],
    ["input (GiB)", (layer) => number(layer.input_bytes / GIB, 4)],
  ], plan.layers);
  fillTable("steps", [
    ["way", (step) => VARIANTS[step.variant]],
    ["step (ms)", (step) => ms(step.step_ms)],
    ["slow-down (%)", (step) => percent(step.vs_ac_percent)],
    ["many blocks, unlimited (%)", (step) => percent(step.closed_form_unlimited_percent)],
    ["many blocks, limited (%)", (step) => percent(step.closed_form_limited_percent)],
    ["held after forward (GiB)", (step) => gib(step.held_bytes / GIB)],
    ["peak (GiB)", (step) => gib(step.peak.num_bytes / GIB)],
    ["pinned per rank (GiB)", (step) => gib(step.pinned_bytes / GIB)],
    ["pinned per node (GiB)", (step) => gib(step.pinned_node_bytes / GIB)],
    ["fits", fitsText],
  ], Object.values(plan.steps), (step) => step.variant === data.variant);
  const { longest } = plan;
  const tokens = (value, isKnown, flag) => !isKnown ? `give ${flag}` : value === null ? "any" : count(value);
  const device = data.machine.device_memory_gib !== null;
  fillTable("longest", [["limit", ([words]) => words], ["tokens", ([, text]) => text]], [
    ["pinned host memory", tokens(longest.host, data.host_budget_bytes !== null, "--host-memory")],
    ["device memory, recompute alone", tokens(longest.device_ac, device, "--gpu-memory")],
    ["device memory, as asked about", tokens(longest.device, device, "--gpu-memory")],
  ]);
}

function show() {
  const link = linkOf(state), { d2h_gb_per_s, h2d_gb_per_s } = link;
  const { model, seq: seq_len, share: devices_per_link } = state;
  plan = makePlan(data, { model, seq_len, d2h_gb_per_s, h2d_gb_per_s, devices_per_link });
  showControls(link);
  showVerdict();
  showSettings();
  showTables();
  drawTimelines();
}

by("asked").textContent = data.asked;
fillControls();
fillLegend();
state = fromAddress();
show();
new ResizeObserver(drawTimelines).observe(by("timelines-title"));

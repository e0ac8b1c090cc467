// The chart of curves: which lines there are, how they are drawn, and how they are pointed at and zoomed.
"use strict";

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const byId = (id) => document.getElementById(id);

/** A new element of HTML with attributes and children; text is never read as markup. */
function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same of SVG. */
function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value !== undefined) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const tenths = new Intl.NumberFormat("en", {
  minimumFractionDigits: 1, maximumFractionDigits: 1, useGrouping: false, roundingMode: "halfEven",
});

/** A value as the tables show it: a share as a percentage with one decimal, other numbers with four digits. */
function shown(value, percent) {
  if (value === null || value === undefined) return "–";
  if (percent) return tenths.format(100 * value);
  const [digits, power] = value.toExponential(3).split("e").map(Number);
  if (value === 0 || (power >= -4 && power < 4)) return String(Number(value.toPrecision(4)));
  return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

/** Round numbers between two limits, about `count` of them. */
function ticks(low, high, count, whole) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) {
    found.push(Number((place * step).toPrecision(12)));
  }
  return found;
}

// ---- lines -------------------------------------------------------------------------------------------------------

const SLOTS = 8, DASHES = ["", "8 4", "2 4", "9 3 2 3"], MARKERS = ["circle", "square", "triangle", "diamond", "cross"];
const STYLES = SLOTS * DASHES.length * MARKERS.length;

/** Which colour, dash and marker a slot has; no two of the first 160 have the same. */
function style(slot) {
  const lap = Math.floor(slot / SLOTS);
  return {
    colour: `var(--slot${slot % SLOTS})`,
    dash: DASHES[(slot + lap) % DASHES.length],
    marker: MARKERS[(slot + Math.floor(slot / (SLOTS * DASHES.length))) % MARKERS.length],
  };
}

/** Megabytes or seconds of one run until each round. */
function spentUntil(run, axis) {
  const rounds = numbers.rounds[run.spent.at];
  return new Map(rounds.map((round, place) => [round, run.spent[axis][place]]));
}

/** One line: the mean over runs at the rounds that all of them have, as it is drawn and as it was measured. */
function lineOf(name, runs, curves, axis) {
  const found = new Map();
  runs.forEach((run, index) => {
    const curve = curves[index];
    if (!curve || !curve.length) return;
    const until = axis === "round" ? null : spentUntil(run, axis);
    numbers.rounds[curve[0]].forEach((round, place) => {
      const x = until ? until.get(round) : round;
      if (x === undefined) return;
      if (!found.has(round)) found.set(round, { xs: [], values: [], drawn: [] });
      found.get(round).xs.push(x);
      found.get(round).values.push(curve[1][place]);
      found.get(round).drawn.push((curve[2] ?? curve[1])[place]);
    });
  });
  const points = [...found].filter(([, at]) => at.values.length === runs.length).sort((a, b) => a[0] - b[0])
    .map(([round, at]) => ({
      round, x: mean(at.xs), y: mean(at.drawn), std: deviation(at.drawn), measured: mean(at.values), count: runs.length,
    }));
  return { name, points };
}

/** All lines of the chart, as the controls have it. */
function linesOf(series, axis, kind) {
  if (kind === "runs") {
    return numbers.experiments.flatMap((one) => one.runs.map((run) => lineOf(run.name, [run], [run.curves[series.id]], axis)));
  }
  const experiments = numbers.experiments.map((one) => lineOf(one.name, one.runs, one.runs.map((run) => run.curves[series.id]), axis));
  if (kind !== "architectures") return experiments;
  const runs = numbers.experiments[0].runs;
  return [
    { ...experiments[0], name: "all clients" },
    ...numbers.by_architecture.map((one) => lineOf(one.name, runs, one.curves[series.id] || [], axis)),
  ];
}

// ---- the chart ---------------------------------------------------------------------------------------------------

const AXES = {
  round: "rounds", megabytes: "megabytes sent", seconds: "seconds of training",
  virtual: "seconds on the clients’ devices", teraflops: "computing of clients, 10¹² operations",
  joules: "joules of the machine",
};
const UNITS = { virtual: "s on the devices", teraflops: "·10¹² operations", joules: "J" };
const FEW = 8;

const chart = {
  lines: [], slots: new Map(), view: null, hot: null, at: null, series: null, axis: "round", kind: "mean",

  start() {
    if (!numbers.series.length) return;
    const groups = new Map();
    for (const series of numbers.series) {
      if (!groups.has(series.kind)) groups.set(series.kind, make("optgroup", { label: series.kind }));
      groups.get(series.kind).append(make("option", { value: series.id }, series.kind === "training" ? series.label : `${series.kind}, ${series.label}`));
    }
    byId("series").append(...groups.values());
    const runs = numbers.experiments.flatMap((one) => one.runs);
    for (const [axis, label] of Object.entries(AXES)) {
      if (axis === "round" || runs.some((run) => run.spent[axis])) byId("axis").append(make("option", { value: axis }, label));
    }
    const seeds = runs.length > numbers.experiments.length;
    const kinds = { mean: seeds ? "mean over seeds" : "single runs" };
    if (seeds) kinds.runs = "single runs";
    if ((numbers.by_architecture || []).length > 1) kinds.architectures = "single architectures";
    for (const [kind, label] of Object.entries(kinds)) byId("kind").append(make("option", { value: kind }, label));
    byId("kind").parentElement.hidden = Object.keys(kinds).length < 2;
    if (kinds.architectures) this.kind = byId("kind").value = "architectures";
    for (const name of ["series", "axis", "kind"]) byId(name).addEventListener("change", () => this.change());
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("zoom-reset").addEventListener("click", () => this.zoom(null));
    byId("chart-values").addEventListener("toggle", () => this.fillTable());
    byId("stills").remove();
    byId("chart-panel").hidden = false;
    this.change();
    new ResizeObserver(() => this.draw()).observe(byId("chart"));
  },

  /** Takes what the controls say, and draws. */
  change() {
    const kind = byId("kind").value, axis = byId("axis").value;
    const fresh = !this.lines.length || kind !== this.kind;
    if (axis !== this.axis) this.view = null;
    this.series = numbers.series.find((series) => series.id === byId("series").value);
    this.kind = kind;
    this.axis = axis;
    this.lines = linesOf(this.series, axis, kind);
    this.hot = this.at = null;
    if (fresh) {
      this.view = null;
      this.choose(this.lines.length <= FEW ? this.lines : this.ranked().slice(0, FEW));
    }
    this.fillLegend();
    this.draw();
  },

  /** The lines, the best at their end first; those without points last. */
  ranked() {
    const sign = this.series.higher === false ? 1 : -1, end = (line) => line.points.at(-1)?.measured;
    return [...this.lines].sort((a, b) => {
      if (end(a) === undefined || end(b) === undefined) return (end(a) === undefined) - (end(b) === undefined);
      return sign * (end(a) - end(b));
    });
  },

  choose(lines) {
    this.slots = new Map(lines.slice(0, STYLES).map((line, slot) => [line.name, slot]));
  },

  toggle(line, on) {
    if (!on) this.slots.delete(line.name);
    else {
      const taken = new Set(this.slots.values());
      let slot = 0;
      while (taken.has(slot)) slot++;
      if (slot < STYLES) this.slots.set(line.name, slot);
    }
    this.fillLegend();
    this.draw();
  },

  fillLegend() {
    const holder = byId("legend"), many = this.lines.length > FEW;
    const before = holder.querySelector("input[type=search]"), filter = before ? before.value : "";
    const focused = document.activeElement?.closest?.("#legend") ? document.activeElement.dataset.name : undefined;
    const scrolled = holder.querySelector("ul")?.scrollTop ?? 0;
    holder.replaceChildren();
    byId("chart").parentElement.classList.toggle("alone", this.lines.length < 2);
    if (this.lines.length < 2) return;
    if (many) {
      const choices = make("div", { class: "choices", role: "group", "aria-label": "Lines in colour" });
      const sets = { [`best ${FEW}`]: () => this.ranked().slice(0, FEW), none: () => [], all: () => this.lines };
      for (const [label, chosen] of Object.entries(sets)) {
        const button = make("button", { type: "button", "data-name": `choice ${label}` }, label);
        button.addEventListener("click", () => { this.choose(chosen()); this.fillLegend(); this.draw(); });
        choices.append(button);
      }
      const search = before || make("input", { type: "search", placeholder: `Find among ${this.lines.length}`, "aria-label": "Find lines by name" });
      if (!before) search.addEventListener("input", () => this.filterLegend());
      holder.append(choices, search);
    }
    const list = make("ul", { "aria-label": "Lines; those ticked are in colour" });
    for (const line of many ? this.ranked() : this.lines) {
      const slot = this.slots.get(line.name);
      const box = make("input", { type: "checkbox", "data-name": line.name });
      box.checked = slot !== undefined;
      box.addEventListener("change", () => this.toggle(line, box.checked));
      const final = line.points.length ? shown(line.points.at(-1).measured, this.series.percent) : "–";
      const label = make("label", {}, box, swatch(slot), make("span", { class: "name" }, line.name), make("span", { class: "final" }, final));
      label.addEventListener("pointerenter", () => this.heat(line));
      label.addEventListener("pointerleave", () => this.heat(null));
      box.addEventListener("focus", () => this.heat(line));
      list.append(make("li", { "data-name": line.name }, label));
    }
    holder.append(list);
    if (filter) this.filterLegend();
    list.scrollTop = scrolled;
    if (focused !== undefined) [...holder.querySelectorAll("[data-name]")].find((one) => one.dataset.name === focused && one.matches("input, button"))?.focus();
  },

  filterLegend() {
    const words = byId("legend").querySelector("input[type=search]").value.toLowerCase();
    for (const item of byId("legend").querySelectorAll("li")) item.hidden = !item.dataset.name.toLowerCase().includes(words);
  },

  /** Limits of both axes around the points in view. */
  limits() {
    const points = this.lines.flatMap((line) => line.points);
    const whole = [0, Math.max(...points.map((point) => point.x), 0) || 1];
    const x = this.view || whole;
    const seen = this.lines.flatMap((line) => line.points.filter((point) => point.x >= x[0] && point.x <= x[1]).flatMap((point) => {
      const coloured = this.slots.has(line.name), banded = coloured && this.kind !== "runs" && point.std !== null;
      const ends = banded ? [this.within(point.y - point.std), this.within(point.y + point.std)] : [point.y];
      return coloured ? [...ends, point.measured] : ends;
    }));
    if (this.target() !== null) seen.push(this.target());
    if (!seen.length) return { x, y: [0, 1], whole };
    let [low, high] = [Math.min(...seen), Math.max(...seen)];
    const least = this.series.percent ? 0.02 : Math.abs(high) * 1e-3 || 1;
    const pad = Math.max(0.05 * (high - low), (least - (high - low)) / 2);
    [low, high] = [low - pad, high + pad];
    if (this.series.percent) [low, high] = [Math.max(0, low), Math.min(1.005, high)];
    return { x, y: [low, high], whole };
  },

  /** The height of the target's line; null where the curves are of something else. */
  target() {
    return numbers.target?.series === this.series.id ? numbers.target.value : null;
  },

  withUnit(value) {
    return `${shown(value, this.series.percent)}${this.series.percent ? " %" : ""}`;
  },

  within(value) {
    return this.series.percent ? Math.min(1, Math.max(0, value)) : value;
  },

  draw() {
    const holder = byId("chart"), width = Math.max(260, Math.floor(holder.clientWidth));
    const height = width < 520 ? 280 : 380, edge = { left: 58, right: 14, top: 14, bottom: 44 };
    const { x: [x0, x1], y: [y0, y1], whole } = this.limits();
    const across = (x) => edge.left + ((x - x0) / (x1 - x0)) * (width - edge.left - edge.right);
    const up = (y) => height - edge.bottom - ((y - y0) / (y1 - y0)) * (height - edge.top - edge.bottom);
    Object.assign(this, { across, up, width, height, edge, range: [x0, x1], whole });
    const focused = document.activeElement === holder.querySelector("svg");
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0", "aria-label": this.inWords(), "aria-describedby": "chart-help" });
    for (const y of ticks(y0, y1, 5)) {
      svg.append(draw("path", { class: "grid", d: `M${edge.left} ${up(y)}H${width - edge.right}` }));
      svg.append(draw("text", { x: edge.left - 8, y: up(y) + 4, "text-anchor": "end" }, this.series.percent ? `${Number((100 * y).toPrecision(6))} %` : String(Number(y.toPrecision(6)))));
    }
    for (const x of ticks(x0, x1, width < 520 ? 4 : 8, this.axis === "round")) {
      svg.append(draw("text", { x: across(x), y: height - edge.bottom + 18, "text-anchor": "middle" }, x.toLocaleString("en")));
    }
    svg.append(draw("path", { class: "axis", d: `M${edge.left} ${height - edge.bottom}H${width - edge.right}` }));
    svg.append(draw("text", { x: (edge.left + width - edge.right) / 2, y: height - 6, "text-anchor": "middle" }, AXES[this.axis]));
    const clip = draw("clipPath", { id: "inside" }, draw("rect", { x: edge.left - 6, y: edge.top - 8, width: width - edge.left - edge.right + 12, height: height - edge.top - edge.bottom + 16 }));
    this.layer = draw("g", { "clip-path": "url(#inside)" });
    const colourless = this.lines.filter((line) => !this.slots.has(line.name));
    const coloured = this.lines.filter((line) => this.slots.has(line.name));
    this.groups = new Map([...colourless, ...coloured].map((line) => [line, this.drawLine(line)]));
    this.layer.append(...this.groups.values());
    this.mark = draw("g");
    svg.append(clip, this.layer, ...this.drawTarget(), this.mark);
    if (!this.lines.some((line) => line.points.length)) {
      svg.append(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "not measured"));
    }
    this.listen(svg);
    holder.replaceChildren(svg);
    if (focused) svg.focus({ preventScroll: true });
    byId("zoom-reset").disabled = byId("zoom-out").disabled = this.view === null;
    if (byId("chart-values").open) this.fillTable();
  },

  drawTarget() {
    if (this.target() === null) return [];
    const { edge, width } = this, y = this.up(this.target()), text = `target ${this.withUnit(this.target())}`;
    return [
      draw("path", { class: "target", d: `M${edge.left} ${y}H${width - edge.right}` }),
      draw("text", { class: "of-target", x: edge.left + 6, y: y - 5 }, text),
    ];
  },

  drawLine(line) {
    const { across, up } = this, slot = this.slots.get(line.name), group = draw("g", { "data-name": line.name });
    const path = (points, y) => points.map((point, place) => `${place ? "L" : "M"}${across(point.x).toFixed(1)} ${up(y(point)).toFixed(1)}`).join("");
    if (slot === undefined) {
      group.append(draw("path", { class: "line other", d: path(line.points, (point) => point.y) }));
      if (line.points.length === 1) group.append(draw("circle", { class: "marker other", cx: across(line.points[0].x), cy: up(line.points[0].y), r: 2.5, style: "color: var(--other)" }));
      return group;
    }
    const { colour, dash, marker } = style(slot);
    group.style.color = colour;
    if (this.kind !== "runs" && line.points.some((point) => point.std !== null)) {
      const above = path(line.points, (point) => this.within(point.y + (point.std ?? 0)));
      const below = path([...line.points].reverse(), (point) => this.within(point.y - (point.std ?? 0)));
      group.append(draw("path", { class: "band", d: `${above}L${below.slice(1)}Z` }));
    }
    if (numbers.smooth > 1) group.append(draw("path", { class: "line pale", d: path(line.points, (point) => point.measured) }));
    group.append(draw("path", { class: "line", d: path(line.points, (point) => point.y), "stroke-dasharray": dash }));
    const apart = Math.max(1, Math.ceil(line.points.length / 10)), first = (slot * 3) % apart;
    for (let place = first; place < line.points.length; place += apart) {
      group.append(markerAt(marker, across(line.points[place].x), up(line.points[place].y)));
    }
    return group;
  },

  inWords() {
    const ends = this.ranked().filter((line) => line.points.length).slice(0, FEW)
      .map((line) => `${line.name} ${this.withUnit(line.points.at(-1).measured)}`);
    const target = this.target() === null ? "" : ` Target: ${this.withUnit(this.target())}.`;
    return `${this.series.kind}, ${this.series.label}, over ${AXES[this.axis]}. At the end: ${ends.join("; ")}.${target}`;
  },

  // ---- pointing and zooming ----

  listen(svg) {
    let from = null, box = null;
    const place = (event) => {
      const frame = svg.getBoundingClientRect();
      return [(event.clientX - frame.left) * (this.width / frame.width), (event.clientY - frame.top) * (this.height / frame.height)];
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = place(event)[0];
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (from !== null && Math.abs(x - from) > 6) {
        box ??= svg.appendChild(draw("rect", { class: "drag", y: this.edge.top, height: this.height - this.edge.top - this.edge.bottom }));
        box.setAttribute("x", Math.min(from, x));
        box.setAttribute("width", Math.abs(x - from));
        this.point(null);
      } else this.point(this.nearest(x, y));
    });
    svg.addEventListener("pointerup", (event) => {
      const to = place(event)[0];
      if (from !== null && box) this.show([this.value(Math.min(from, to)), this.value(Math.max(from, to))]);
      else this.point(this.nearest(...place(event)));
      from = box = null;
    });
    svg.addEventListener("pointercancel", () => { box?.remove(); from = box = null; });
    svg.addEventListener("pointerleave", () => { if (from === null) this.point(null); });
    svg.addEventListener("dblclick", () => this.zoom(null));
    svg.addEventListener("blur", () => this.point(null));
    svg.addEventListener("keydown", (event) => this.press(event));
  },

  value(x) {
    const share = (x - this.edge.left) / (this.width - this.edge.left - this.edge.right);
    return this.range[0] + share * (this.range[1] - this.range[0]);
  },

  nearest(x, y) {
    let best = null, closest = 60 ** 2;
    for (const line of this.lines) {
      const far = this.slots.has(line.name) ? 1 : 4;
      line.points.forEach((point, place) => {
        if (point.x < this.range[0] || point.x > this.range[1]) return;
        const distance = far * ((this.across(point.x) - x) ** 2 + (this.up(point.y) - y) ** 2);
        if (distance < closest) [closest, best] = [distance, { line, place }];
      });
    }
    return best;
  },

  /** Marks one point and says its value; null marks none. */
  point(at) {
    const tip = byId("tip");
    this.at = at;
    this.heat(at ? at.line : null);
    this.mark.replaceChildren();
    tip.hidden = !at;
    if (!at) return;
    const point = at.line.points[at.place], x = this.across(point.x), y = this.up(point.y), slot = this.slots.get(at.line.name);
    this.mark.append(draw("path", { class: "cross", d: `M${x} ${this.edge.top}V${this.height - this.edge.bottom}` }));
    this.mark.append(draw("circle", { class: "spot", cx: x, cy: y, r: 5, style: `color: ${slot === undefined ? "var(--ink)" : style(slot).colour}` }));
    const unit = this.series.percent ? " %" : "", spread = point.std === null ? "" : ` ± ${shown(point.std, this.series.percent)}`;
    const drawn = `${shown(point.y, this.series.percent)}${spread}${unit}`;
    const value = numbers.smooth > 1 ? `${this.withUnit(point.measured)}, smoothed ${drawn}` : drawn;
    const where = this.axis === "round" ? `round ${point.round}` : `round ${point.round}, ${shown(point.x, false)} ${UNITS[this.axis] ?? this.axis}`;
    const over = point.count > 1 ? `, ${point.count} seeds` : "";
    tip.replaceChildren(make("strong", {}, at.line.name), `${value}`, make("br"), make("span", { class: "quiet" }, `${where}${over}`));
    this.place(tip, x, y);
    byId("chart-live").textContent = document.activeElement?.closest?.("#chart") ? `${at.line.name}, ${where}: ${value}` : "";
  },

  place(tip, x, y) {
    const frame = byId("chart").querySelector("svg").getBoundingClientRect();
    const left = frame.left + x * (frame.width / this.width), top = frame.top + y * (frame.height / this.height);
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const beside = left + 14 + tip.offsetWidth > room ? left - 14 - tip.offsetWidth : left + 14;
    tip.style.left = `${window.scrollX + Math.min(Math.max(8, beside), room)}px`;
    tip.style.top = `${window.scrollY + Math.max(8, top - tip.offsetHeight - 10)}px`;
  },

  /** Lifts one line out of the others; null lifts none. */
  heat(line) {
    this.hot = line;
    for (const [one, group] of this.groups || []) {
      group.classList.toggle("hot", one === line);
      group.classList.toggle("dimmed", line !== null && one !== line && this.slots.has(one.name));
    }
    for (const item of byId("legend").querySelectorAll("label")) item.classList.toggle("hot", !!line && item.parentElement.dataset.name === line.name);
  },

  zoom(factor) {
    if (factor === null) return this.show(null);
    const [low, high] = this.range, middle = this.at ? this.at.line.points[this.at.place].x : (low + high) / 2;
    return this.show([middle - ((high - low) * factor) / 2, middle + ((high - low) * factor) / 2]);
  },

  /** Shows this part of the horizontal axis; null the whole. */
  show(view) {
    if (view) {
      const [low, high] = this.whole, least = (high - low) / 1000;
      const span = Math.max(least, view[1] - view[0]), start = Math.min(Math.max(low, view[0]), Math.max(low, high - span));
      view = [start, Math.min(high, start + span)];
      if (view[0] <= low && view[1] >= high) view = null;
    }
    this.view = view;
    this.point(null);
    this.draw();
  },

  press(event) {
    const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0" || event.key === "Escape") this.zoom(null);
    else if (event.key in moves) this.step(...moves[event.key]);
    else return;
    event.preventDefault();
  },

  /** Moves the marked point along its line, or to the next line by rank. */
  step(along, down) {
    const lines = this.ranked().filter((line) => line.points.length);
    if (!lines.length) return;
    if (!this.at) return this.point({ line: lines[0], place: lines[0].points.length - 1 });
    const line = lines[(lines.indexOf(this.at.line) + down + lines.length) % lines.length];
    const x = this.at.line.points[this.at.place].x;
    const same = line === this.at.line ? this.at.place : line.points.reduce((best, point, place) => Math.abs(point.x - x) < Math.abs(line.points[best].x - x) ? place : best, 0);
    return this.point({ line, place: Math.min(line.points.length - 1, Math.max(0, same + along)) });
  },

  fillTable() {
    const lines = this.lines.filter((line) => this.slots.has(line.name) && line.points.length);
    const rounds = [...new Set(lines.flatMap((line) => line.points.map((point) => point.round)))].sort((a, b) => a - b);
    const at = lines.map((line) => new Map(line.points.map((point) => [point.round, point])));
    const unit = this.series.percent ? " (%)" : "";
    const table = make("table", { id: "values" }, make("caption", {}, `${this.series.kind}, ${this.series.label}${unit}`),
      make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "n" }, "Round"), ...lines.map((line) => make("th", { scope: "col", class: "n" }, line.name)))),
      make("tbody", {}, ...rounds.map((round) => make("tr", {}, make("th", { scope: "row", class: "n" }, String(round)),
        ...at.map((points) => make("td", { class: "n" }, shown(points.get(round)?.measured, this.series.percent)))))));
    byId("chart-values").querySelector(".scroll").replaceChildren(table);
  },
};

function markerAt(kind, x, y) {
  const r = 3.6;
  const shapes = {
    circle: `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
    square: `M${x - r + 0.4} ${y - r + 0.4}h${2 * r - 0.8}v${2 * r - 0.8}h${0.8 - 2 * r}Z`,
    triangle: `M${x} ${y - r - 0.8}L${x + r + 0.6} ${y + r - 0.6}H${x - r - 0.6}Z`,
    diamond: `M${x} ${y - r - 1}L${x + r + 1} ${y}L${x} ${y + r + 1}L${x - r - 1} ${y}Z`,
    cross: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`,
  };
  return draw("path", { class: "marker", d: shapes[kind] });
}

/** A sample of a line, as in the chart. */
function swatch(slot) {
  const svg = draw("svg", { width: 38, height: 12, "aria-hidden": "true" });
  if (slot === undefined) svg.append(draw("path", { class: "line other", d: "M1 6H37" }));
  else {
    const { colour, dash, marker } = style(slot);
    svg.style.color = colour;
    svg.append(draw("path", { class: "line", d: "M1 6H37", "stroke-dasharray": dash }), markerAt(marker, 19, 6));
  }
  return svg;
}

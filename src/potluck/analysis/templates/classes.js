// The matrix of actual and predicted classes, and the picture of how classes are divided among clients.

const MOST_CELLS = 12000, LEGIBLE_COLUMNS = 20;

/** A table of counts whose cells are as deep in colour as their share of the largest in their row or at all. */
function matrixOf(caption, corner, rowNames, columnNames, counts, by) {
  const dense = columnNames.length > LEGIBLE_COLUMNS, largest = Math.max(1, ...counts.flat());
  const table = make("table", { class: dense ? "matrix dense" : "matrix" }, make("caption", { class: "visually-hidden" }, caption));
  const headings = columnNames.map((name, place) => make("th", { scope: "col" }, dense && place % 10 ? "" : name));
  table.append(make("thead", {}, make("tr", {}, make("th", { scope: "col" }, corner), ...headings)));
  const body = make("tbody");
  counts.forEach((row, place) => {
    const whole = by === "row" ? row.reduce((sum, count) => sum + count, 0) || 1 : largest;
    const cells = row.map((count, column) => {
      const cell = make("td", count ? { style: `--share: ${((50 * count) / whole).toFixed(1)}%` } : {}, count ? String(count) : "");
      if (by === "row" && column === place) cell.classList.add("own");
      if (dense && count) cell.title = `${rowNames[place]}, ${columnNames[column]}: ${count}`;
      return cell;
    });
    body.append(make("tr", {}, make("th", { scope: "row" }, rowNames[place]), ...cells));
  });
  table.append(body);
  return make("div", {}, make("p", { class: "quiet small words", "aria-hidden": "true" }, caption), scrolling(caption, table));
}

function scrolling(label, table) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

const classNames = (count) => Array.from({ length: count }, (_, place) => numbers.classes[place] ?? String(place));
const percentOf = (part, whole) => (whole ? tenths.format((100 * part) / whole) : "–");

/** Recall and precision of each class, and what it is most often taken for. */
function byClassTable({ counts: [hits, predicted, actual], confusion }, names) {
  const headings = ["Class", "Examples", "Recall (%)", "Precision (%)", ...(confusion ? ["Most often taken for"] : [])];
  const rows = names.map((name, place) => {
    const cells = [make("td", { class: "n" }, String(actual[place])), make("td", { class: "n" }, percentOf(hits[place], actual[place])),
      make("td", { class: "n" }, percentOf(hits[place], predicted[place]))];
    if (confusion) {
      const others = confusion[place].map((count, other) => (other === place ? -1 : count)), most = Math.max(...others);
      cells.push(make("td", {}, most > 0 ? `${names[others.indexOf(most)]} (${most})` : "–"));
    }
    return make("tr", {}, make("th", { scope: "row" }, name), ...cells);
  });
  const table = make("table", { class: "sortable" }, make("caption", {}, "Class by class."),
    make("thead", {}, make("tr", {}, ...headings.map((text, column) => make("th", { scope: "col", class: column > 0 && column < 4 ? "n" : false }, text)))),
    make("tbody", {}, ...rows));
  return make("div", {}, scrolling("Class by class", table));
}

function showClasses(holder, place) {
  const found = numbers.by_class[place];
  holder.replaceChildren();
  if (!found) return holder.append(make("p", { class: "quiet" }, "The runs of this experiment have not recorded it: they are not finished, or an earlier version wrote them."));
  const names = classNames(found.counts[0].length), seeds = found.runs > 1 ? `, ${found.runs} seeds together` : "";
  const pair = make("div", { class: "pair" });
  if (found.confusion && names.length ** 2 <= MOST_CELLS) {
    const caption = `How many examples of each actual class (rows) were predicted as each class (columns), on all own test parts after the last round${seeds}.`;
    pair.append(matrixOf(caption, "", names, names, found.confusion, "row"));
  }
  const table = byClassTable(found, names);
  pair.append(table);
  if (names.length > 14) pair.classList.remove("pair");
  holder.append(pair);
  return new SortableTable(table.querySelector("table"));
}

function startClasses() {
  const holder = byId("classes");
  if (!holder || !numbers.by_class) return;
  const body = make("div");
  if (numbers.experiments.length > 1) {
    const select = make("select", { id: "classes-of" }, ...numbers.experiments.map((one, place) => make("option", { value: place }, one.name)));
    select.addEventListener("change", () => showClasses(body, Number(select.value)));
    select.value = Math.max(0, numbers.by_class.findIndex((found) => found));
    holder.append(make("div", { class: "controls" }, make("label", {}, "Experiment ", select)));
  }
  holder.append(body);
  holder.hidden = false;
  showClasses(body, Math.max(0, numbers.by_class.findIndex((found) => found)));
}

// ---- how classes are divided among clients -----------------------------------------------------------------------

function showPartition(holder, { train }) {
  const classes = classNames(train[0].length), most = Math.max(1, Math.floor(MOST_CELLS / classes.length));
  const seen = train.slice(0, most), clients = seen.map((_, client) => String(client));
  const counts = classes.map((_, place) => seen.map((row) => row[place]));
  const sizes = train.map((row) => row.reduce((sum, count) => sum + count, 0));
  const held = train.map((row) => row.filter((count) => count).length);
  const cut = seen.length < train.length ? ` Only the first ${seen.length} of ${train.length} clients are shown.` : "";
  const caption = `Training examples of each class (rows) that each client has (columns); the deeper, the more.${cut}`;
  const range = (values) => (Math.min(...values) === Math.max(...values) ? String(values[0]) : `${Math.min(...values)} to ${Math.max(...values)}`);
  holder.replaceChildren(matrixOf(caption, "Class", classes, clients, counts, "all"),
    make("p", { class: "quiet small" }, `${train.length} clients with ${range(sizes)} training examples of ${range(held)} of ${classes.length} classes.`));
}

function startPartition() {
  const holder = byId("partition");
  if (!holder || !(numbers.partitions || []).length) return;
  const body = make("div");
  if (numbers.partitions.length > 1) {
    const named = numbers.partitions.map(({ seeds, runs }) => (runs.length > seeds.length || runs.length > 1 ? `seed ${seeds.join(", ")} (${runs.length} runs)` : runs[0]));
    const select = make("select", { id: "partition-of" }, ...named.map((name, place) => make("option", { value: place }, name)));
    select.addEventListener("change", () => showPartition(body, numbers.partitions[select.value]));
    holder.append(make("div", { class: "controls" }, make("label", {}, "Division ", select)));
  }
  holder.append(body);
  holder.hidden = false;
  showPartition(body, numbers.partitions[0]);
}

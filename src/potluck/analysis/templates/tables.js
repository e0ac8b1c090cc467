// Tables that sort by a click on a heading, filter by words, and show a long list only when asked.

const FIRST_ROWS = 20, FILTERED_FROM = 8;

/** What a cell is sorted by: its exact number, a number that its text begins with, or its text; null if empty. */
function sortKey(cell) {
  if (cell.dataset.v !== undefined) return cell.dataset.v === "" ? null : Number(cell.dataset.v);
  const text = cell.textContent.trim();
  if (text === "–" || text === "") return null;
  const number = cell.classList.contains("n") ? Number.parseFloat(text.replace(/[,>]/g, "")) : NaN;
  return Number.isNaN(number) ? text : number;
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** One table with its controls. */
class SortableTable {
  constructor(table) {
    this.table = table;
    this.all = false;
    this.words = "";
    this.headings = [...table.tHead.rows[0].cells];
    this.box = make("div", { class: "filter" });
    this.search = make("input", { type: "search", placeholder: "Filter rows", "aria-label": `Filter the rows of ${this.title()}` });
    this.status = make("span", { class: "quiet small", role: "status" });
    this.more = make("button", { type: "button", class: "more" });
    this.box.append(this.search, this.status);
    const holder = table.closest(".scroll");
    holder.before(this.box);
    holder.after(this.more);
    this.search.addEventListener("input", () => { this.words = this.search.value.trim().toLowerCase(); this.show(); });
    this.more.addEventListener("click", () => { this.all = !this.all; this.show(); });
    this.addButtons();
    this.show();
  }

  title() {
    return this.table.closest("section").querySelector("h2").textContent;
  }

  addButtons() {
    this.headings.forEach((heading, column) => {
      const button = make("button", { type: "button" }, ...heading.childNodes);
      heading.replaceChildren(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => this.sort(column));
    });
  }

  /** Sorts by a column: first the best way round for it, then the other; empty cells stay last. */
  sort(column) {
    const heading = this.headings[column], now = heading.getAttribute("aria-sort");
    const numeric = heading.classList.contains("n");
    const order = now === "none" ? (numeric ? "descending" : "ascending") : now === "descending" ? "ascending" : "descending";
    for (const other of this.headings) other.setAttribute("aria-sort", other === heading ? order : "none");
    const sign = order === "ascending" ? 1 : -1, body = this.table.tBodies[0];
    const rows = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compareKeys(a, b)));
    body.append(...rows.map(([, row]) => row));
    this.show();
  }

  /** Shows the rows that have all the words, the first of them until all are asked for. */
  show() {
    const rows = [...this.table.tBodies[0].rows], words = this.words.split(/\s+/);
    const matching = rows.filter((row) => !this.words || words.every((word) => row.textContent.toLowerCase().includes(word)));
    const shown = new Set(this.all ? matching : matching.slice(0, FIRST_ROWS));
    for (const row of rows) row.hidden = !shown.has(row);
    this.box.hidden = rows.length < FILTERED_FROM;
    this.status.textContent = shown.size < rows.length ? `${shown.size} of ${rows.length} rows` : "";
    this.more.hidden = matching.length <= FIRST_ROWS;
    this.more.textContent = this.all ? `Show the first ${FIRST_ROWS}` : `Show all ${matching.length}`;
  }
}

// ---- the table of single clients ---------------------------------------------------------------------------------

/** Fills the table of clients for one run, with as many metrics as the page holds. */
function fillClients(place) {
  const { architectures, columns, rows } = numbers.clients, more = numbers.clients_more || { columns: [], rows: [] };
  const body = byId("clients").tBodies[0], extra = more.rows[place] || [];
  body.replaceChildren(...rows[place].map((row, index) => {
    const [client, architecture, train, test, ...values] = row, all = [...values, ...(extra[index] || [])];
    const cells = all.map((value, column) => {
      const { percent } = [...columns, ...more.columns][column];
      return make("td", { class: "n", "data-v": value ?? "" }, shown(value, percent));
    });
    return make("tr", {}, make("th", { scope: "row", class: "n" }, String(client)), make("td", {}, architectures[architecture]),
      make("td", { class: "n" }, String(train)), make("td", { class: "n" }, String(test)), ...cells);
  }));
}

function startClients() {
  const table = byId("clients");
  if (!table || !numbers.clients) return;
  const more = (numbers.clients_more || { columns: [] }).columns;
  for (const { metric, measure, percent } of more) {
    table.tHead.rows[0].append(make("th", { scope: "col", class: "n" }, `${metric}${percent ? " (%)" : ""}, ${measure}`));
  }
  fillClients(0);
  const runs = numbers.experiments.flatMap((one) => one.runs), sortable = new SortableTable(table);
  hideEmptyColumns(table);
  if (runs.length < 2) return;
  const select = byId("client-run");
  select.append(...runs.map((run, place) => make("option", { value: place }, run.name)));
  byId("client-run-label").hidden = false;
  select.addEventListener("change", () => {
    fillClients(Number(select.value));
    byId("client-run-name").textContent = runs[select.value].name;
    hideEmptyColumns(table);
    for (const heading of sortable.headings) heading.setAttribute("aria-sort", "none");
    sortable.show();
  });
}

/** Hides columns in which no row has a number. */
function hideEmptyColumns(table) {
  const rows = [...table.tBodies[0].rows];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const empty = rows.length > 0 && rows.every((row) => row.cells[column]?.textContent === "–");
    heading.hidden = empty;
    for (const row of rows) if (row.cells[column]) row.cells[column].hidden = empty;
  });
}

// What happens when the page is opened.

function startTheme() {
  const button = byId("theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  prefersDark.addEventListener("change", label);
  label();
  button.hidden = false;
}

startTheme();
chart.start();
startClients();
startClasses();
startPartition();
for (const table of document.querySelectorAll("table.sortable")) {
  if (!table.querySelector("[aria-sort]")) {
    new SortableTable(table);
    if (table.id !== "repeat") hideEmptyColumns(table);
  }
}

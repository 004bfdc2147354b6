"use strict";
(function () {
  const root = document.documentElement;
  root.classList.add("live");

  const theme = document.querySelector("[data-theme-button]");
  const themes = ["auto", "light", "dark"];
  if (theme) theme.addEventListener("click", function () {
    const name = themes[(themes.indexOf(theme.textContent) + 1) % 3];
    if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
    theme.textContent = name;
    theme.setAttribute("aria-label", "Theme: " + (name === "auto" ? "as the system" : name));
  });

  const table = document.querySelector("table.review");
  if (!table) return;
  const body = table.tBodies[0], rows = Array.from(body.rows), classes = JSON.parse(table.dataset.classes);
  const find = (name) => document.querySelector(name);
  const filters = Array.from(document.querySelectorAll("[data-filter]"));
  const search = find("[data-search]"), sort = find("[data-sort]"), state = find("[data-state]");
  let saved = true;

  const choice = (row) => row.querySelector("select");
  const tick = (row) => row.querySelector("input");
  const shown = () => Array.from(body.rows).filter((row) => !row.hidden);

  function mark(row) {
    const changed = choice(row).value !== row.dataset.given;
    row.classList.toggle("changed", changed);
    if (tick(row)) tick(row).checked = changed && choice(row).value === row.dataset.suggested;
  }

  function tell(note) {
    const changed = rows.filter((row) => choice(row).value !== row.dataset.given).length;
    state.textContent = (note ? note + " " : "") + shown().length + " of " + rows.length + " shown, " + changed + " changed.";
  }

  function filter() {
    const text = search.value.trim().toLowerCase();
    for (const row of rows) {
      row.hidden = filters.some((f) => f.value && row.dataset[f.dataset.filter] !== f.value)
        || (text !== "" && !row.dataset.id.toLowerCase().includes(text));
    }
    tell();
  }

  function order() {
    const key = sort.value.replace("-", ""), sign = sort.value.startsWith("-") ? -1 : 1;
    const rank = (a, b) => a.dataset.rank - b.dataset.rank;
    const compare = key === "rank" ? rank
      : (a, b) => a.dataset[key].localeCompare(b.dataset[key], undefined, { numeric: true }) || rank(a, b);
    body.append(...rows.slice().sort((a, b) => sign * compare(a, b)));
  }

  function fill(select) {
    if (select.dataset.full) return;
    select.dataset.full = "yes";
    const known = new Set(Array.from(select.options, (option) => option.value));
    for (const name of classes) if (!known.has(name)) select.add(new Option(name, name));
  }

  function decide(row, label) {
    choice(row).value = label;
    mark(row);
    saved = false;
  }

  // As the CSV files beside the letter have it: no cell that a spreadsheet would run.
  const neutral = (cell) => (/^'*[=+\-@\t\r\n＝＋－＠]/.test(cell) ? "'" + cell : cell);
  const quoted = (cell) => '"' + neutral(cell).replace(/"/g, '""') + '"';

  function save() {
    const lines = [["id", "label", "given", "suggested", "finding", "suspicion", "accepted"].join(",")];
    for (const row of shown()) {
      const d = row.dataset, label = choice(row).value;
      const accepted = label !== d.given && label === d.suggested ? "yes" : "no";
      lines.push([d.id, label, d.given, d.suggested, d.finding, d.suspicion, accepted].map(quoted).join(","));
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
    link.download = "labels.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    saved = shown().length === rows.length;
    tell("Saved labels.csv.");
  }

  body.addEventListener("focusin", (event) => { if (event.target.tagName === "SELECT") fill(event.target); });
  body.addEventListener("pointerdown", (event) => { if (event.target.tagName === "SELECT") fill(event.target); });
  body.addEventListener("change", function (event) {
    const row = event.target.closest("tr");
    if (event.target.type === "checkbox") decide(row, event.target.checked ? row.dataset.suggested : row.dataset.given);
    else decide(row, event.target.value);
    tell();
  });
  filters.forEach((f) => f.addEventListener("change", filter));
  search.addEventListener("input", filter);
  sort.addEventListener("change", () => { order(); tell(); });
  find("[data-all]").addEventListener("click", function () {
    const different = shown().filter((row) => row.dataset.finding === "looks different");
    different.forEach((row) => decide(row, row.dataset.suggested));
    tell("Accepted " + different.length + " confident suggestions.");
  });
  find("[data-none]").addEventListener("click", function () {
    shown().forEach((row) => decide(row, row.dataset.given));
    tell("Undone.");
  });
  find("[data-save]").addEventListener("click", save);
  addEventListener("beforeunload", (event) => { if (!saved) event.preventDefault(); });
  rows.forEach(mark);
  filter();
}());

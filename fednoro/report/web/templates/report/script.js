"use strict";
(() => {
  const root = document.documentElement, tip = document.getElementById("tip"), theme = document.getElementById("theme");

  // Theme: as the system, light, dark. Storage may be forbidden for files; then a choice lasts as long as the page.
  const order = ["auto", "light", "dark"], names = { auto: "as the system", light: "light", dark: "dark" };
  const recall = () => { try { return localStorage.getItem("fednoro-theme"); } catch { return null; } };
  const choose = (name) => {
    if (name === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = name;
    theme.textContent = name;
    theme.setAttribute("aria-label", `Theme: ${names[name]}`);
    try { localStorage.setItem("fednoro-theme", name); } catch { /* see above */ }
  };
  theme.hidden = false;
  theme.addEventListener("click", () => choose(order[(order.indexOf(theme.textContent) + 1) % 3]));
  choose(order.includes(recall()) ? recall() : "auto");

  // Tips: a mark's title is moved into an attribute when it is first pointed at, so that the browser does not show it too.
  let lit = null;
  const words = (mark) => {
    const title = mark.querySelector(":scope > title");
    if (title) { mark.dataset.tip = title.textContent; title.remove(); }
    return mark.dataset.tip;
  };
  const hide = () => { tip.hidden = true; if (lit) lit.classList.remove("lit"); lit = null; };
  const show = (mark, x, y) => {
    if (mark !== lit) {
      hide();
      tip.textContent = words(mark);
      tip.hidden = false;
      mark.classList.add("lit");
      lit = mark;
    }
    const box = tip.getBoundingClientRect(), width = root.clientWidth;
    const left = Math.max(4, Math.min(x + 12, width - box.width - 4));
    const top = y - box.height - 12 < 4 ? y + 18 : y - box.height - 12;
    tip.style.transform = `translate(${Math.round(left)}px,${Math.round(top)}px)`;
  };
  const has = (mark) => mark.dataset.tip !== undefined || (mark.firstElementChild && mark.firstElementChild.tagName === "title");
  const follow = (event) => {
    const mark = event.target.closest("svg > *");
    if (mark && has(mark)) show(mark, event.clientX, event.clientY); else hide();
  };
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("scroll", hide, true);

  // Keys: the arrows go from mark to mark of the figure that has the focus.
  const at = new WeakMap();
  const step = (svg, by, far) => {
    const marks = [...svg.children].filter((mark) => has(mark) && !mark.classList.contains("off"));
    if (!marks.length) return;
    const now = marks.indexOf(at.get(svg));
    const next = far ? (by < 0 ? 0 : marks.length - 1) : Math.max(0, Math.min(marks.length - 1, now + by));
    at.set(svg, marks[next]);
    marks[next].scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = marks[next].getBoundingClientRect();
    requestAnimationFrame(() => requestAnimationFrame(() => show(marks[next], box.x + box.width / 2, box.y + box.height / 2)));
  };
  const keys = { ArrowRight: [1], ArrowDown: [1], ArrowLeft: [-1], ArrowUp: [-1], Home: [-1, true], End: [1, true] };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (event.target.dataset && event.target.dataset.toggle && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      flip(event.target);
    } else if (event.target.tagName === "svg" && keys[event.key]) {
      event.preventDefault();
      step(event.target, ...keys[event.key]);
    }
  });
  document.addEventListener("focusout", hide);

  // Legends: an entry shows and hides its series.
  const flip = (entry) => {
    const svg = entry.closest("svg"), name = entry.dataset.toggle, off = !entry.classList.contains("dim");
    for (const mark of svg.querySelectorAll("[data-s]")) if (mark.dataset.s === name) mark.classList.toggle("off", off);
    for (const other of svg.querySelectorAll("[data-toggle]")) {
      if (other.dataset.toggle !== name) continue;
      other.classList.toggle("dim", off);
      if (other.tagName === "text") other.setAttribute("aria-pressed", String(!off));
    }
  };
  for (const entry of document.querySelectorAll("svg text[data-toggle]")) {
    entry.setAttribute("tabindex", "0");
    entry.setAttribute("role", "button");
    entry.setAttribute("aria-pressed", "true");
    entry.closest("svg").setAttribute("role", "group");
  }
  document.addEventListener("click", (event) => {
    const entry = event.target.closest("[data-toggle]");
    if (entry) flip(entry);
  });

  // Tables: a heading sorts by its column, numbers as numbers.
  const value = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => parseFloat(text.replace(/[,%]/g, "").replace("−", "-"));
  const sort = (head, column) => {
    const table = head.closest("table"), body = table.tBodies[0], up = head.getAttribute("aria-sort") !== "ascending";
    const rows = [...body.rows], numeric = rows.every((row) => value(row, column) === "–" || !Number.isNaN(number(value(row, column))));
    const key = (row) => { const n = number(value(row, column)); return Number.isNaN(n) ? -Infinity : n; };
    rows.sort((a, b) => (numeric ? key(a) - key(b) : value(a, column).localeCompare(value(b, column), undefined, { numeric: true })) * (up ? 1 : -1));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(head, column));
      head.append(button);
    });
  }
})();

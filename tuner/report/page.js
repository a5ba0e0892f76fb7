"use strict";
(() => {
  const table = document.getElementById("rows");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const texts = rows.map((row) => row.textContent.toLowerCase());

  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, index) => {
      const visible = words.every((word) => texts[index].includes(word));
      row.hidden = !visible;
      count += visible ? 1 : 0;
    });
    shown.textContent = words.length ? `${count} of ${rows.length}` : "";
  };
  filter.addEventListener("input", show);

  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const text = row.cells[column].textContent;
        const number = Number(text);
        return text === "-" || text === "" ? null : Number.isNaN(number) ? text : number;
      };
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        const sign = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
        return down ? -sign : sign;
      };
      body.append(...[...rows].sort(order));
    });
  });

  const tip = document.getElementById("tip");
  const textOf = (mark) => {
    const title = mark.querySelector("title");
    if (title) {
      mark.dataset.tip = title.textContent;
      title.remove();
    }
    return mark.dataset.tip;
  };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest ? event.target.closest(".mark, .part, .limit") : null;
    const text = mark ? textOf(mark) : undefined;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const right = window.innerWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, right))}px`;
    const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
    tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 8}px`;
  });
  document.addEventListener("click", (event) => {
    const mark = event.target.closest ? event.target.closest(".mark[data-number]") : null;
    const row = mark && rows.find((one) => one.dataset.number === mark.dataset.number);
    if (!row) return;
    rows.forEach((one) => one.classList.toggle("marked", one === row));
    row.scrollIntoView({ block: "center" });
  });
})();

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const by = (row) => row.cells[column].dataset.by;
      const rows = [...table.tBodies[0].rows];
      const numeric = rows.every((row) => by(row) !== "" && Number.isFinite(Number(by(row))));
      rows.sort((a, b) => (numeric ? Number(by(a)) - Number(by(b)) : by(a).localeCompare(by(b), undefined, { numeric: true })));
      table.tBodies[0].append(...(up ? rows : rows.reverse()));
    });
  });
}
document.getElementById("filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of document.querySelectorAll("section")) {
    let count = 0;
    for (const row of section.querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    section.querySelector(".count").textContent = count;
  }
});

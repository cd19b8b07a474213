"use strict";
for (const svg of document.querySelectorAll("svg.curve[data-points]")) {
  const points = JSON.parse(svg.dataset.points);
  const hover = svg.querySelector(".hover");
  const [line, circle] = [hover.querySelector("line"), hover.querySelector("circle")];
  const shown = svg.closest("figure").querySelector("figcaption b");
  const last = shown.dataset.last;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * (svg.viewBox.baseVal.width / box.width);
    let best = points[0];
    for (const point of points) if (Math.abs(point[2] - x) < Math.abs(best[2] - x)) best = point;
    line.setAttribute("x1", best[2]);
    line.setAttribute("x2", best[2]);
    circle.setAttribute("cx", best[2]);
    circle.setAttribute("cy", best[3]);
    hover.setAttribute("visibility", "visible");
    shown.textContent = `${best[0]}: ${Number(best[1].toPrecision(4))}`;
  });
  svg.addEventListener("pointerleave", () => {
    hover.setAttribute("visibility", "hidden");
    shown.textContent = last;
  });
}

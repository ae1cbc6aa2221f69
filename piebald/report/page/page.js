"use strict";
(async () => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const touch = matchMedia("(pointer: coarse)").matches;

  // "$name" or "$name/opacity" anywhere in a chart stands for a colour of the style sheet
  const colour = (name) => {
    const [variable, opacity] = name.slice(1).split("/");
    const hex = getComputedStyle(document.documentElement).getPropertyValue("--" + variable).trim();
    if (opacity === undefined) return hex;
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${red}, ${green}, ${blue}, ${opacity})`;
  };
  const painted = (value, key) => {
    if (key === "meta") return value;
    if (typeof value === "string") return /^\$[a-z]+(-\w+)?(\/[\d.]+)?$/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.map((entry) => painted(entry));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, painted(entry, name)]));
    }
    return value;
  };

  // a click on a heading sorts its table, by numbers where cells have one
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        const value = (row) => {
          const cell = row.cells[column];
          return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
        };
        const order = (one, two) => {
          const [a, b] = [value(one), value(two)];
          if (a === null || b === null) {
            return one.cells[column].textContent.localeCompare(two.cells[column].textContent, undefined, { numeric: true });
          }
          return a - b;
        };
        const rows = [...table.tBodies[0].rows].sort(order);
        table.tBodies[0].append(...(down ? rows : rows.reverse()));
      });
    });
  }

  const axis = (own) => ({
    automargin: true,
    gridcolor: "$grid",
    linecolor: "$rule",
    ticks: "",
    zeroline: false,
    zerolinecolor: "$soft",
    tickfont: { color: "$soft" },
    fixedrange: touch,
    ...own,
    title: { standoff: 12, font: { color: "$soft", size: 13 }, ...own.title },
  });
  const themed = (layout) => ({
    ...layout,
    autosize: true,
    showlegend: false,
    dragmode: touch ? false : "zoom",
    paper_bgcolor: "rgba(0, 0, 0, 0)",
    plot_bgcolor: "rgba(0, 0, 0, 0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: narrow.matches ? 12 : 13, color: "$ink" },
    margin: { l: 8, r: narrow.matches ? 8 : 16, t: 12, b: 8 },
    hoverlabel: { bgcolor: "$raised", bordercolor: "$rule", font: { color: "$ink" } },
    xaxis: axis({ nticks: narrow.matches ? 6 : 0, ...layout.xaxis }),
    yaxis: axis(layout.yaxis || {}),
  });

  const hidden = new Set();
  const draw = () => {
    for (const chart of charts) {
      const shown = chart.data.filter((trace) => !hidden.has(trace.meta));
      Plotly.react(chart.id, painted(shown), painted(themed(chart.layout)), {
        responsive: true,
        displayModeBar: false,
      });
    }
  };
  // plotly.js comes packed; the content security policy allows exactly its text to run
  const load = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  };
  if (charts.length === 0) return;
  try {
    await load();
  } catch (error) {
    document.getElementById("old").hidden = false;
    return;
  }
  draw();
  // a chart below a closed line has no width; paper has all of them
  for (const part of document.querySelectorAll("details")) {
    part.addEventListener("toggle", () => part.querySelectorAll(".plot").forEach((plot) => Plotly.Plots.resize(plot)));
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details.part").forEach((part) => { part.open = true; }));
  addEventListener("hashchange", () => {
    const part = document.getElementById(location.hash.slice(1))?.closest("details");
    if (part) part.open = true;
  });
  const keys = [...document.querySelectorAll(".keys button")];
  for (const key of keys) {
    key.addEventListener("click", () => {
      const { series } = key.dataset;
      if (!hidden.delete(series)) hidden.add(series);
      for (const other of keys) {
        if (other.dataset.series === series) other.setAttribute("aria-pressed", String(!hidden.has(series)));
      }
      draw();
    });
  }
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();

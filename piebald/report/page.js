"use strict";
(() => {
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
  const painted = (value) => {
    if (typeof value === "string") return /^\$[a-z]+(-\w+)?(\/[\d.]+)?$/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.map(painted);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, painted(entry)]));
    }
    return value;
  };

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

  const draw = () => {
    for (const chart of charts) {
      Plotly.react(chart.id, painted(chart.data), painted(themed(chart.layout)), {
        responsive: true,
        displaylogo: false,
        displayModeBar: touch ? false : "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
      });
    }
  };
  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();

"use strict";
// Draws the charts with plotly, which the page carries packed, in the page's own colours; light and dark, and the keys.
{
  const plots = [...document.querySelectorAll(".plot")];
  const figures = new Map(plots.map((plot) => [plot, JSON.parse(plot.querySelector("script").textContent)]));
  const hidden = new Set(); // runs that the legend has switched off
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const palette = [...document.styleSheets[0].cssRules].find((rule) => rule.media?.mediaText === dark.media);
  const shade = document.getElementById("shade");
  let chosen = null; // dark (true) or light (false), if the reader has chosen

  const isDark = () => chosen ?? dark.matches;

  // plotly takes no CSS variables: put their values in.
  function painted(value, colours) {
    if (typeof value === "string") {
      return value.startsWith("var(") ? colours.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => painted(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, colours)]));
  }

  function draw(plot) {
    const colours = getComputedStyle(document.documentElement);
    const { data, layout } = painted(figures.get(plot), colours);
    const [ink, quiet, card, rule] = ["ink", "quiet", "card", "rule"].map((name) =>
      colours.getPropertyValue(`--${name}`).trim(),
    );
    const axis = {
      gridcolor: rule,
      zerolinecolor: rule,
      linecolor: rule,
      spikecolor: quiet,
      spikethickness: 1,
      fixedrange: true,
    };
    const shared = {
      template: { layout: { xaxis: axis, yaxis: axis } },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: quiet },
      margin: { l: 48, r: 12, t: 10, b: 42 },
      hoverlabel: { bgcolor: card, bordercolor: rule, font: { color: ink }, namelength: -1 },
      showlegend: false,
      dragmode: false,
    };
    const visible = data.filter((trace) => !hidden.has(trace.meta));
    return Plotly.react(plot, visible, { ...shared, ...layout }, { displayModeBar: false, responsive: true });
  }

  // Arrow keys step through the points of a chart as the pointer does.
  function step(plot, direction) {
    const values = plot.data.flatMap((trace) => (trace.hoverinfo === "skip" ? [] : trace.x.filter((x) => x !== null)));
    const places = [...new Set(values)].sort((a, b) => a - b);
    const from = plot.dataset.at === undefined ? (direction > 0 ? -1 : places.length) : places.indexOf(Number(plot.dataset.at));
    const at = places[Math.min(Math.max(from + direction, 0), places.length - 1)];
    plot.dataset.at = at;
    if (plot.layout.hovermode === "x unified") {
      Plotly.Fx.hover(plot, { xval: at }, "xy");
      return;
    }
    const points = plot.data.flatMap((trace, curveNumber) => {
      const pointNumber = trace.hoverinfo === "skip" ? -1 : trace.x.indexOf(at);
      return pointNumber < 0 || trace.y[pointNumber] === null ? [] : [{ curveNumber, pointNumber }];
    });
    Plotly.Fx.hover(plot, points);
  }

  function listen(plot) {
    plot.addEventListener("keydown", (event) => {
      const direction = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (direction === undefined) return;
      event.preventDefault();
      step(plot, direction);
    });
    plot.addEventListener("blur", () => {
      delete plot.dataset.at;
      Plotly.Fx.unhover(plot);
    });
  }

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  const pause = () => new Promise((resolve) => setTimeout(resolve));

  async function drawAll() {
    const script = document.createElement("script");
    script.textContent = await unpack(document.getElementById("plotly").textContent.trim());
    document.head.append(script);
    for (const plot of plots) {
      await draw(plot);
      listen(plot);
      await pause(); // the page answers between two charts
    }
    document.documentElement.dataset.charts = "drawn";
  }

  function redraw() {
    palette.media.mediaText = chosen === null ? dark.media : chosen ? "all" : "not all";
    shade.textContent = isDark() ? "Light" : "Dark";
    plots.filter((plot) => plot.data).forEach(draw); // the others are still to be drawn for the first time
  }

  shade.hidden = false;
  shade.addEventListener("click", () => {
    chosen = !isDark();
    redraw();
  });
  dark.addEventListener("change", redraw);
  for (const button of document.querySelectorAll("[data-run]")) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      const shown = hidden.delete(run);
      if (!shown) hidden.add(run);
      button.setAttribute("aria-pressed", String(shown));
      redraw();
    });
  }
  redraw();
  if (plots.length) {
    if ("DecompressionStream" in window) drawAll();
    else document.documentElement.dataset.charts = "none";
  }
}

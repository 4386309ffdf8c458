"use strict";
/* Draw the curves of the report with uPlot from the data in #data. Text from files is set as textContent only. */
(() => {
  const COLOURS = 7; // of arms; later arms have the same ones, dashed
  const AXES = [
    {name: "epochs", label: "epoch"},
    {name: "gradient evaluations", label: "gradient evaluations, in epochs of SGD"},
    {name: "seconds", label: "training seconds"},
  ];
  const EPOCH = 0, MEAN = 1, STD = 2; // indices in a point
  const FONT = "12px system-ui, sans-serif";
  const EPOCHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]; // between ticks
  const probe = element(document.body, "i");
  probe.hidden = true;

  function element(parent, name, text, attributes) {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  }

  /* The colour of a class as rgb(...), since a canvas knows no CSS. */
  function colour(name) {
    probe.className = name;
    return getComputedStyle(probe).color;
  }

  /* Add a row of buttons, one of which is pressed. */
  function chooser(parent, label, names, choose) {
    if (names.length < 2) return;
    const group = element(parent, "div", null, {class: "switch", role: "group", "aria-label": label});
    const buttons = names.map((name, i) => element(group, "button", name, {type: "button", "aria-pressed": i === 0}));
    buttons.forEach((button, i) => button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", other === button));
      choose(i);
    }));
  }

  /* Three significant digits; whole numbers as they are. */
  function figures(value) {
    if (value && (Math.abs(value) < 1e-5 || Math.abs(value) > 1e7)) return value.toExponential(2);
    if (Number.isInteger(value)) return String(value);
    return value.toFixed(Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))))));
  }

  function reading([mean, std], form) {
    const signed = (text) => text.replace("-", "−");
    if (form.endsWith("number")) return signed(figures(mean)) + (std ? ` ± ${figures(std)}` : "");
    const sign = form === "points" && mean > 0 ? "+" : "";
    return `${sign}${signed(mean.toFixed(2))}${std ? ` ± ${std.toFixed(2)}` : ""}${unit(form)}`;
  }

  const unit = (form) => (form.endsWith("percent") ? " %" : "");

  /* The position of a point on an axis; null if unknown. */
  const along = (costs, arm, point, axis) => (axis ? costs?.[arm][point[EPOCH]]?.[axis - 1] ?? null : point[EPOCH]);

  /* The numbers of other curves that a curve nearly covers over most of its length, itself included: they take turns. */
  function covered(data, k, count, log) {
    const scaled = (value) => (value === undefined || value === null ? NaN : log ? Math.log(value) : value);
    const values = [...Array(count).keys()].map((i) => Array.from(data[3 * i + 1], scaled));
    const known = values.flat().filter((value) => !Number.isNaN(value));
    const near = 0.01 * (Math.max(...known) - Math.min(...known));
    return [...values.keys()].filter((i) => {
      const gaps = values[k].map((value, x) => Math.abs(value - values[i][x])).filter((gap) => !Number.isNaN(gap));
      return gaps.length && gaps.filter((gap) => gap <= near).length >= 0.8 * gaps.length;
    });
  }

  /* Dashes of the curve k, such that curves that cover each other show one after the other. */
  function turns(data, k, count, arm, log) {
    const others = covered(data, k, count, log), own = arm < COLOURS ? [] : [5, 4], at = others.indexOf(k);
    if (others.length < 2) return own;
    return at ? [0, 8 * at, 8, 8 * (others.length - 1 - at)] : [8, 8 * (others.length - 1)];
  }

  /* One x for all curves, and for each of them the mean and the edges of its band. */
  function aligned(series, at, form) {
    const scale = form.endsWith("number") ? 1 : 100, log = form.startsWith("log");
    const tables = series.map(({arm, points}) => {
      const known = points.filter((p) => at(arm, p) !== null && (!log || p[MEAN] > 0));
      const column = (of) => known.map((p) => scale * of(p));
      const std = (p) => p[STD] || 0;
      const clip = (edge, mean) => (log ? Math.max(edge, mean / 1000) : edge); // a logarithm needs a positive edge
      const edges = [-1, 1].map((sign) => column((p) => clip(p[MEAN] + sign * std(p), p[MEAN])));
      return [known.map((p) => at(arm, p)), column((p) => p[MEAN]), ...edges];
    });
    return uPlot.join(tables);
  }

  function options(chart, arms, series, state, width, data) {
    const axis = state.axis, form = chart.form;
    const ink = () => colour("soft"), grid = {stroke: () => colour("hair"), width: 1};
    const last = (values) => values.findLastIndex((value) => value !== undefined && value !== null);
    const curves = series.flatMap(({arm}, i) => {
      const stroke = () => colour(`a${arm % COLOURS}`), show = !state.hidden.has(arm);
      const value = (plot, _, k, at) => {
        const index = at ?? last(plot.data[k]), mean = plot.data[k][index];
        return mean === undefined ? "" : reading([mean, plot.data[k + 2][index] - mean], form);
      };
      const button = element(null, "button", arms[arm], {type: "button", "aria-pressed": show});
      const edge = {class: "edge", show, stroke: "transparent", spanGaps: true, points: {show: false}, label: ""};
      const dash = turns(data, i, series.length, arm, form.startsWith("log"));
      return [{label: button, arm, show, stroke, dash, value, width: 2, spanGaps: true}, edge, edge];
    });
    const bands = series.map(({arm}, i) => (
      {series: [3 * i + 3, 3 * i + 2], fill: () => colour(`a${arm % COLOURS}`).replace(")", ", 0.15)")}
    ));
    const at = (plot, x, _, index) => (index === null || index === undefined ? "at the end" : figures(x));
    return {
      width, height: width > 620 ? 340 : 240, bands, padding: [10, 12, 0, 0],
      series: [{label: AXES[axis].label, value: at}, ...curves],
      scales: {
        x: {time: false, range: (_, low, high) => [state.close ? high / 2 : axis ? 0 : Math.min(low, high - 1), high]},
        y: form.startsWith("log") ? {distr: 3} : {range: (_, low, high) => {
          const pad = 0.04 * (high - low || Math.abs(high) || 1);
          return [low - pad, form === "percent" ? Math.min(high + pad, Math.max(100, high)) : high + pad];
        }},
      },
      axes: [
        {label: AXES[axis].label, labelFont: FONT, font: FONT, size: 26, labelSize: 18, stroke: ink, grid: {show: false}, ticks: {show: false}, gap: 6,
          ...(axis === 0 ? {incrs: EPOCHS} : {})},
        {font: FONT, size: form.startsWith("log") ? 72 : 56, stroke: ink, grid, ticks: {show: false},
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : `${+tick.toPrecision(6)}${unit(form)}`))},
      ],
      cursor: {y: false, hover: {prox: width / 8}},
      legend: {markers: {dash: (plot, k) => (plot.series[k].arm < COLOURS ? "solid" : "dashed")}},
      hooks: {
        drawAxes: [(plot) => form === "points" && line(plot, 0)],
        setSeries: [(plot, k, change) => {
          if (k === null || change.show === undefined || plot.series[k].arm === undefined) return;
          const {arm, label} = plot.series[k];
          if (change.show) state.hidden.delete(arm);
          else state.hidden.add(arm);
          label.setAttribute("aria-pressed", change.show);
          [k + 1, k + 2].forEach((other) => plot.setSeries(other, {show: change.show}));
        }],
      },
    };
  }

  function line(plot, value) {
    if (plot.scales.y.min > value || plot.scales.y.max < value) return;
    plot.ctx.fillStyle = colour("soft");
    plot.ctx.fillRect(plot.bbox.left, Math.round(plot.valToPos(value, "y", true)), plot.bbox.width, devicePixelRatio);
  }

  /* Return a function that draws a chart as its buttons and the width of the page say. */
  function curves(chart, study, container) {
    const arms = study.arms.map((arm, i) => chart.names?.[i] ?? arm);
    const costs = chart.form === "points" ? null : study.costs; // gains are at equal epochs
    const state = {axis: 0, view: 0, close: false, hidden: new Set()};
    let plot = null;
    function draw() {
      plot?.destroy();
      const view = chart.views[state.view];
      const at = (arm, point) => along(costs, arm, point, state.axis);
      const series = view.series.filter((s) => s.points.some((p) => at(s.arm, p) !== null));
      const data = aligned(series, at, chart.form), log = chart.form.startsWith("log");
      const shared = series.filter((_, k) => covered(data, k, series.length, log).length > 1);
      const names = (of) => of.map((s) => arms[s.arm]).join(", ");
      const turns = shared.length ? `; in turn, as dashes: ${names(shared)}` : "";
      container.setAttribute("aria-label", `${chart.title}, ${view.label}: ${names(series)}${turns}`);
      plot = new uPlot(options(chart, arms, series, state, container.clientWidth, data), data, container);
    }
    controls(chart, costs, container, state, draw);
    container.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], {min, max} = plot.scales.x;
      if (!step) return;
      event.preventDefault();
      const shown = [...plot.data[0].keys()].filter((i) => plot.data[0][i] >= min && plot.data[0][i] <= max);
      const from = shown.indexOf(plot.cursor.idx);
      const to = from < 0 ? (step > 0 ? 0 : shown.length - 1) : Math.max(0, Math.min(shown.length - 1, from + step));
      plot.setCursor({left: plot.valToPos(plot.data[0][shown[to]], "x"), top: 0});
    });
    return draw;
  }

  function controls(chart, costs, container, state, draw) {
    const row = element(null, "div", null, {class: "controls"});
    const series = chart.views.flatMap((view) => view.series);
    const known = (axis) => series.some((s) => s.points.some((p) => along(costs, s.arm, p, axis) !== null));
    const axes = [...AXES.keys()].filter(known);
    const choose = (key, values) => (i) => { state[key] = values[i]; draw(); };
    chooser(row, "Axis", axes.map((i) => AXES[i].name), choose("axis", axes));
    chooser(row, "Curve", chart.views.map((view) => view.label), choose("view", [...chart.views.keys()]));
    if (chart.form === "percent") chooser(row, "Range", ["all", "second half"], choose("close", [false, true]));
    if (row.children.length) container.before(row);
  }

  /* Dark or light: as the system is set, until the button is pressed. */
  function theme(redraw) {
    const root = document.documentElement, button = document.getElementById("theme");
    const kept = { // a page opened from a file may have no storage
      get() { try { return localStorage.getItem("equipoise-theme"); } catch { return null; } },
      set(value) { try { localStorage.setItem("equipoise-theme", value); } catch { /* lasts for this visit only */ } },
    };
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const other = () => ((root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark");
    const show = () => { button.textContent = other() === "dark" ? "Dark" : "Light"; redraw(); };
    if (["dark", "light"].includes(kept.get())) root.dataset.theme = kept.get();
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = other();
      kept.set(root.dataset.theme);
      show();
    });
    dark.addEventListener("change", show);
    show();
  }

  const studies = JSON.parse(document.getElementById("data").textContent);
  const drawn = [...document.querySelectorAll("figure.lines")].map((figure) => {
    const study = studies[figure.dataset.study], container = figure.querySelector(".drawing");
    const draw = curves(study.charts[figure.dataset.chart], study, container);
    let width = container.clientWidth;
    new ResizeObserver(() => {
      if (container.clientWidth === width) return;
      width = container.clientWidth;
      draw();
    }).observe(container);
    return draw;
  });
  theme(() => drawn.forEach((draw) => draw()));
})();

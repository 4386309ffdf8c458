"use strict";
/* Draw the charts of the report as SVG from the data in #data. Text from files is set as textContent only. */
(() => {
  const COLOURS = 8;
  const AXES = [
    {name: "epochs", label: "epoch", at: (value) => `epoch ${figures(value)}`},
    {
      name: "gradient evaluations",
      label: "gradient evaluations, in epochs of SGD",
      at: (value) => `${figures(value)} epochs of SGD`,
    },
    {name: "seconds", label: "training seconds", at: (value) => `${figures(value)} s`},
  ];
  const MEAN = 3, STD = 4; // indices in a point, after one number per axis
  const WIDE = 620, LETTER = 6.8; // pixels
  let clips = 0;

  /* Elements */

  function element(parent, name, text, attributes) {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  }

  function shape(parent, name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  const canvas = (parent, width, height, label) =>
    shape(parent, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label});
  const stroke = (parent, kind, x1, y1, x2, y2) => shape(parent, "line", {class: kind, x1, y1, x2, y2});
  const write = (parent, text, x, y, anchor, kind) =>
    shape(parent, "text", {x, y, "text-anchor": anchor || "start", class: kind || "plain"}, text);
  const dot = (parent, arm, cx, cy) => shape(parent, "circle", {class: `mark-dot ${armClass(arm)}`, cx, cy, r: 4});
  const armClass = (arm) => `a${arm % COLOURS}` + (arm >= COLOURS ? " second" : "");
  const pair = (x, y) => `${x.toFixed(1)},${y.toFixed(1)}`;

  /* Write a name at the left of a row, shortened to the room there is. */
  function rowName(parent, name, right, y) {
    const letters = Math.floor(right / LETTER);
    const short = name.length <= letters ? name : `${name.slice(0, Math.max(1, letters - 1))}…`;
    shape(write(parent, short, right - 8, y, "end", "name"), "title", {}, name);
  }

  const roomFor = (names, most) => Math.min(most, 12 + LETTER * Math.max(...names.map((name) => name.length)));

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

  /* Add the box that follows the pointer. */
  function tip(parent) {
    const box = element(parent, "div", null, {class: "tip", hidden: "", "aria-live": "polite"});
    return {
      hide: () => { box.hidden = true; },
      show(title, rows, x, y, width) {
        box.replaceChildren();
        element(box, "p", title);
        for (const [arm, name, value] of rows) {
          const row = element(box, "div");
          element(row, "i", null, {class: `key ${armClass(arm)}`});
          element(row, "span", name);
          element(row, "b", value);
        }
        box.hidden = false;
        const left = x > width / 2 ? x - box.offsetWidth - 12 : x + 12;
        box.style.left = `${Math.max(0, Math.min(left, width - box.offsetWidth))}px`;
        box.style.top = `${Math.max(0, y)}px`;
      },
    };
  }

  /* Numbers */

  /* Number of decimals for three significant digits; 0 for a whole number. */
  function decimals(value) {
    return Number.isInteger(value) ? 0 : Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
  }

  function figures(value) {
    if (value && (Math.abs(value) < 1e-5 || Math.abs(value) > 1e7)) return value.toExponential(2);
    return value.toFixed(decimals(value));
  }

  function plusMinus(deviation, digits) {
    const text = deviation ? deviation.toFixed(digits) : "0";
    return Number(text) ? ` ± ${text}` : "";
  }

  const FORMS = {
    percent: (value, deviation) => `${(100 * value).toFixed(2)}${plusMinus(deviation && 100 * deviation, 2)} %`,
    points: (value, deviation) =>
      `${value < 0 ? "-" : "+"}${Math.abs(100 * value).toFixed(2)}${plusMinus(deviation && 100 * deviation, 2)}`,
    number: (value, deviation) => figures(value) + plusMinus(deviation, decimals(value)),
  };

  /* Round numbers between low and high: about `count` of them, at least `least` apart. */
  function ticks(low, high, count, least) {
    const rough = Math.max((high - low || 1) / count, least || 0);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) found.push(i * step);
    return {found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9))};
  }

  const nearest = (items, value, position) =>
    items.reduce((best, item) => (Math.abs(position(item) - value) < Math.abs(position(best) - value) ? item : best));

  /* Lines with bands over seeds */

  function lines(chart, allArms, container) {
    const arms = allArms.map((arm, i) => chart.names?.[i] ?? arm);
    const state = {axis: 0, view: 0, close: false, hidden: new Set(), near: null};
    lineControls(chart, container, state, redraw);
    lineLegend(chart, arms, container, state, redraw);

    function redraw() {
      container.replaceChildren();
      state.near = null;
      const view = chart.views[state.view];
      const series = view.series
        .filter((s) => !state.hidden.has(s.arm))
        .map((s) => ({arm: s.arm, points: s.points.filter((p) => p[state.axis] !== null)}))
        .filter((s) => s.points.length);
      const frame = frameOf(container.clientWidth, series, state, chart.form);
      const label = `${chart.title}, ${view.label}: ${series.map((s) => arms[s.arm]).join(", ")}`;
      const svg = canvas(container, frame.width, frame.height, label);
      drawAxes(svg, frame, chart.form, state.axis);
      if (!series.length) return;
      const inside = clipped(svg, frame);
      series.forEach((s) => drawBand(inside, s, frame, state.axis));
      series.forEach((s) => drawCurve(inside, s, frame, state.axis));
      follow(svg, container, series, frame, state, chart.form, arms);
    }
    return redraw;
  }

  function lineControls(chart, container, state, redraw) {
    const controls = element(null, "div", null, {class: "controls"});
    const points = chart.views.flatMap((view) => view.series.flatMap((s) => s.points));
    const axes = AXES.map((_, i) => i).filter((i) => points.some((p) => p[i] !== null));
    const choose = (key, values) => (i) => { state[key] = values[i]; redraw(); };
    chooser(controls, "Axis", axes.map((i) => AXES[i].name), choose("axis", axes));
    chooser(controls, "Curve", chart.views.map((view) => view.label), choose("view", [...chart.views.keys()]));
    if (chart.form === "percent") chooser(controls, "Range", ["all", "second half"], choose("close", [false, true]));
    if (controls.children.length) container.before(controls);
  }

  function lineLegend(chart, arms, container, state, redraw) {
    const legend = element(null, "div", null, {class: "legend"});
    container.after(legend);
    const present = new Set(chart.views.flatMap((view) => view.series.map((s) => s.arm)));
    for (const arm of [...present].sort((a, b) => a - b)) {
      const button = element(legend, "button", null, {type: "button", "aria-pressed": true});
      element(button, "i", null, {class: `key ${armClass(arm)}`});
      element(button, "span", arms[arm]);
      button.addEventListener("click", () => {
        const shown = state.hidden.has(arm);
        if (shown) state.hidden.delete(arm);
        else state.hidden.add(arm);
        button.setAttribute("aria-pressed", shown);
        redraw();
      });
    }
  }

  /* The edges of the drawing and the scales of both axes. */
  function frameOf(width, series, state, form) {
    const frame = {width, left: 40, right: width - 8, top: 8, height: width > WIDE ? 340 : 230, start: 0, end: 1};
    frame.bottom = frame.height - 30;
    const points = series.flatMap((s) => s.points);
    let low = 0, high = 1;
    if (points.length) {
      const along = points.map((p) => p[state.axis]);
      frame.end = Math.max(...along, 1e-9);
      if (state.axis === 0) frame.start = Math.min(...along, frame.end - 1); // epochs count from 1
      if (state.close) frame.start = frame.end / 2;
      const seen = points.filter((p) => p[state.axis] >= frame.start);
      low = Math.min(...seen.map((p) => p[MEAN] - (p[STD] || 0)));
      high = Math.max(...seen.map((p) => p[MEAN] + (p[STD] || 0)));
    }
    const pad = (high - low || Math.abs(high) || 1) * 0.04;
    frame.low = low - pad;
    frame.high = form === "percent" ? Math.min(high + pad, Math.max(1, high)) : high + pad;
    const across = (frame.right - frame.left) / (frame.end - frame.start);
    const up = (frame.bottom - frame.top) / (frame.high - frame.low);
    frame.x = (value) => frame.left + (value - frame.start) * across;
    frame.y = (value) => frame.bottom - (value - frame.low) * up;
    frame.value = (x) => frame.start + (x - frame.left) / across;
    return frame;
  }

  function drawAxes(svg, frame, form, axis) {
    const scale = form === "number" ? 1 : 100, unit = form === "percent" ? "%" : "";
    const up = ticks(frame.low * scale, frame.high * scale, frame.height > 300 ? 7 : 5);
    for (const tick of up.found) {
      const y = frame.y(tick / scale);
      stroke(svg, "grid", frame.left, y, frame.right, y);
      write(svg, tick.toFixed(up.digits) + unit, frame.left - 6, y + 4, "end");
    }
    stroke(svg, "axis", frame.left, frame.bottom, frame.right, frame.bottom);
    if (form === "points" && frame.low < 0 && frame.high > 0) stroke(svg, "axis", frame.left, frame.y(0), frame.right, frame.y(0));
    const along = ticks(frame.start, frame.end, frame.width > WIDE ? 10 : 6, axis === 0 ? 1 : 0);
    for (const tick of along.found) {
      const x = frame.x(tick);
      write(svg, tick.toFixed(along.digits), x, frame.bottom + 14, x > frame.right - 20 ? "end" : "middle");
    }
    write(svg, AXES[axis].label, frame.right, frame.bottom + 27, "end", "quiet");
  }

  function clipped(svg, frame) {
    const id = `clip${clips++}`;
    const size = {width: frame.right - frame.left + 2, height: frame.bottom - frame.top + 2};
    shape(shape(svg, "clipPath", {id}), "rect", {x: frame.left, y: frame.top - 2, ...size});
    return shape(svg, "g", {"clip-path": `url(#${id})`});
  }

  function drawBand(parent, series, frame, axis) {
    const points = series.points.filter((p) => p[STD] !== null);
    if (points.length < 2) return;
    const edge = (sign) => points.map((p) => pair(frame.x(p[axis]), frame.y(p[MEAN] + sign * p[STD])));
    const outline = [...edge(1), ...edge(-1).reverse()].join("L");
    shape(parent, "path", {class: `band ${armClass(series.arm)}`, d: `M${outline}Z`});
  }

  function drawCurve(parent, series, frame, axis) {
    const points = series.points.map((p) => [frame.x(p[axis]), frame.y(p[MEAN])]);
    const path = `M${points.map(([x, y]) => pair(x, y)).join("L")}`;
    if (points.length === 1) dot(parent, series.arm, ...points[0]);
    else shape(parent, "path", {class: `line ${armClass(series.arm)}`, d: path});
  }

  /* Show a guide that follows the pointer or the arrow keys. */
  function follow(svg, container, series, frame, state, form, arms) {
    const axis = state.axis, along = (point) => point[axis];
    const all = series.flatMap((s) => s.points.map(along)).filter((x) => x >= frame.start);
    const stops = [...new Set(all)].sort((a, b) => a - b);
    const layer = shape(svg, "g", {});
    const box = tip(container);
    const hide = () => { layer.replaceChildren(); box.hide(); state.near = null; };

    function show(value) {
      state.near = value;
      layer.replaceChildren();
      stroke(layer, "guide", frame.x(value), frame.top, frame.x(value), frame.bottom);
      const rows = [];
      for (const s of series) {
        const point = nearest(s.points, value, along);
        const over = value > along(s.points[s.points.length - 1]) * 1.001; // the arm ended earlier
        if (over || Math.abs(along(point) - value) > frame.end / 8) continue;
        if (point[MEAN] >= frame.low) dot(layer, s.arm, frame.x(along(point)), frame.y(point[MEAN]));
        rows.push([s.arm, arms[s.arm], FORMS[form](point[MEAN], point[STD]), point[MEAN]]);
      }
      rows.sort((a, b) => b[3] - a[3]);
      box.show(AXES[axis].at(value), rows, frame.x(value), frame.top, frame.width);
    }

    svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      show(nearest(stops, frame.value(x), (stop) => stop));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.setAttribute("tabindex", 0);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      const from = state.near === null ? (step > 0 ? -1 : stops.length) : stops.indexOf(state.near);
      show(stops[Math.max(0, Math.min(stops.length - 1, from + step))]);
    });
  }

  /* Bars: one row per arm */

  function bars(chart, arms, container) {
    return () => {
      container.replaceChildren();
      chart.groups.forEach((group) => drawBars(group, arms, container));
    };
  }

  function drawBars(group, arms, container) {
    const width = container.clientWidth, row = 20, top = 24;
    const room = roomFor(arms, width * 0.36);
    const label = group.rows.map(([arm, mean]) => `${arms[arm]} ${figures(mean)}`).join(", ");
    const svg = canvas(container, width, top + row * group.rows.length + 8, `${group.label}: ${label}`);
    write(svg, group.label, 0, 14);
    const most = Math.max(...group.rows.map(([, mean, std]) => mean + (std || 0)), 1e-12);
    const length = (value) => (Math.max(0, value) / most) * (width - room - 92);
    group.rows.forEach(([arm, mean, std], i) => {
      const y = top + row * i, middle = y + row / 2 - 1.5, text = FORMS.number(mean, std);
      rowName(svg, arms[arm], room, y + 12);
      const size = {width: Math.max(1, length(mean)), height: row - 7, rx: 2};
      const bar = shape(svg, "rect", {class: `bar ${armClass(arm)}`, x: room, y: y + 2, ...size});
      shape(bar, "title", {}, `${arms[arm]}: ${text}`);
      if (std) stroke(svg, "whisker", room + length(mean - std), middle, room + length(mean + std), middle);
      write(svg, text, room + length(mean + (std || 0)) + 6, y + 12);
    });
  }

  /* Dots: one row per layer, density on a logarithmic axis */

  function dots(chart, arms, container) {
    const nameOf = (s) => (chart.series.length === 1 ? "all arms" : s.arms.map((arm) => arms[arm]).join(", "));
    const legend = element(null, "div", null, {class: "legend"});
    container.after(legend);
    for (const s of chart.series) {
      const item = element(legend, "span");
      element(item, "i", null, {class: `key round ${armClass(s.arms[0])}`});
      element(item, "span", nameOf(s));
    }
    return () => {
      container.replaceChildren();
      drawDots(chart, container, nameOf);
    };
  }

  function drawDots(chart, container, nameOf) {
    const width = container.clientWidth, row = 18, right = width - 14, bottom = row * chart.layers.length + 6;
    const room = roomFor(chart.layers.map(([name]) => name), width * 0.45);
    const known = chart.series.flatMap((s) => s.densities).filter((density) => density > 0);
    const least = Math.floor(Math.log10(Math.min(...known, 0.5)) + 1e-9); // exponent of the left end
    const x = (density) => room + (1 - Math.log10(Math.max(density, 10 ** least)) / least) * (right - room);
    const svg = canvas(container, width, bottom + 22, `${chart.title}, ${chart.layers.length} layers`);
    for (let power = least; power <= 0; power++) {
      const at = x(10 ** power);
      stroke(svg, "grid", at, 0, at, bottom);
      write(svg, `${Number((100 * 10 ** power).toPrecision(1))}%`, at, bottom + 16, "middle");
    }
    chart.layers.forEach(([name], i) => {
      const y = row * (i + 0.5) + 2;
      stroke(svg, "grid", room, y, right, y);
      rowName(svg, name, room, y + 4);
      const present = chart.series.filter((s) => s.densities[i] !== null);
      present.forEach((s) => dot(svg, s.arms[0], x(s.densities[i]), y));
    });
    const box = tip(container);
    svg.addEventListener("pointerleave", box.hide);
    svg.addEventListener("pointermove", (event) => {
      const edge = svg.getBoundingClientRect();
      const i = Math.floor((event.clientY - edge.top - 2) / row);
      if (i < 0 || i >= chart.layers.length) return box.hide();
      const [name, size] = chart.layers[i];
      const present = chart.series.filter((s) => s.densities[i] !== null);
      const rows = present.map((s) => [s.arms[0], nameOf(s), FORMS.percent(s.densities[i], null)]);
      const title = `${name}, ${size.toLocaleString("en")} weights`;
      return box.show(title, rows, event.clientX - edge.left, row * (i + 1) + 4, width);
    });
  }

  /* Dark or light: as the system is set, until the button is pressed. */
  function theme() {
    const root = document.documentElement, button = document.getElementById("theme");
    const kept = { // a page opened from a file may have no storage
      get() { try { return localStorage.getItem("equipoise-theme"); } catch { return null; } },
      set(value) { try { localStorage.setItem("equipoise-theme", value); } catch { /* lasts for this visit only */ } },
    };
    const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const other = () => ((root.dataset.theme || system()) === "dark" ? "light" : "dark");
    const name = () => { button.textContent = other() === "dark" ? "Dark" : "Light"; };
    if (["dark", "light"].includes(kept.get())) root.dataset.theme = kept.get();
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = other();
      kept.set(root.dataset.theme);
      name();
    });
    name();
  }

  const KINDS = {lines, bars, dots};
  const studies = JSON.parse(document.getElementById("data").textContent);
  theme();
  for (const figure of document.querySelectorAll("figure.chart")) {
    const study = studies[figure.dataset.study], chart = study.charts[figure.dataset.chart];
    const container = figure.querySelector(".drawing");
    const redraw = KINDS[chart.kind](chart, study.arms, container);
    let width = container.clientWidth;
    redraw();
    new ResizeObserver(() => {
      if (container.clientWidth !== width) {
        width = container.clientWidth;
        redraw();
      }
    }).observe(container);
  }
})();

// Zooms the charts of the page. Nothing is fetched and nothing is kept; without this script the
// page shows every chart as a whole.
//
// A chart is a <figure class="chart">. Its range is a part of its axis, from 0 to 1; charts over
// steps share one range, so that skew and step time show the same steps. To zoom sets the view box
// of the plot, places what lies over it, and draws heat maps and lines again from the chart's
// values: every two bytes of them are a logarithm of seconds (`encode` in chart.py).
"use strict";
(() => {
  const FIELD = 1000, COLUMNS = 400, LEVELS = 8, LEAST_S = 1e-9, DECADES = 13;
  const WHOLE = [0, 1];

  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
  const count = (x) => Math.round(x).toLocaleString("en");

  function element(name, attributes, parent) {
    const made = document.createElementNS(parent.namespaceURI, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    parent.append(made);
    return made;
  }

  function seconds(value) {
    for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]])
      if (value * factor >= 0.9995) return `${Number((value * factor).toPrecision(3))} ${unit}`;
    return value ? `${Number((value * 1e9).toPrecision(3))} ns` : "0 s";
  }

  function decoded(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const values = new Float64Array(bytes.length / 2);
    for (let i = 0; i < values.length; i++) {
      const code = view.getUint16(2 * i, true);
      values[i] = code ? LEAST_S * 10 ** (((code - 1) / 65534) * DECADES) : 0;
    }
    return values;
  }

  // Round numbers from `low` to `high`, about `wanted` of them.
  function ticks(low, high, wanted, whole) {
    const rough = (high - low) / wanted;
    const magnitude = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((x) => x * magnitude).find((x) => x >= rough);
    if (whole) step = Math.max(1, step);
    const first = Math.ceil(low / step - 1e-9);
    const found = [];
    for (let i = first; i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(9)));
    return found;
  }

  class Chart {
    constructor(figure, axis) {
      this.figure = figure;
      this.axis = axis; // the charts that share this chart's range
      this.plot = figure.querySelector(".plot");
      this.marks = figure.querySelector(".marks");
      this.over = figure.querySelector(".over");
      this.scale = figure.querySelector(".axis");
      this.field = figure.querySelector(".field");
      this.end = Number(figure.dataset.end);
      this.height = Number(figure.dataset.height);
      this.unit = figure.dataset.unit;
      this.original = [this.marks.innerHTML, this.over.innerHTML, this.scale.innerHTML];
      this.places = [...this.over.children].map((text) => parseFloat(text.getAttribute("x")) / 100);
      if (figure.dataset.values) {
        this.values = decoded(figure.dataset.values);
        this.columns = Number(figure.dataset.columns);
        this.rows = JSON.parse(figure.dataset.rows);
        this.top = Number(figure.dataset.top);
      }
      this.addToolbar();
      this.addPointer();
      figure.addEventListener("keydown", (event) => this.onKey(event));
    }

    addToolbar() {
      const bar = document.createElement("div");
      bar.className = "toolbar";
      const button = (label, words, action) => {
        const made = document.createElement("button");
        made.type = "button";
        made.textContent = label;
        made.title = words;
        made.setAttribute("aria-label", words);
        made.addEventListener("click", action);
        bar.append(made);
        return made;
      };
      button("+", "Zoom in", () => this.axis.zoom(0.5));
      button("−", "Zoom out", () => this.axis.zoom(2));
      this.reset = button("Show all", "Show all", () => this.axis.set(WHOLE));
      this.status = document.createElement("span");
      this.status.setAttribute("role", "status");
      this.readout = document.createElement("span");
      this.readout.className = "readout";
      bar.append(this.status, this.readout);
      const hint = document.createElement("span");
      hint.className = "hint";
      hint.textContent = "Drag, pinch, Ctrl + wheel or + − to zoom; ← → to move; Esc to show all.";
      bar.append(hint);
      this.figure.append(bar);
    }

    // --- drawing -----------------------------------------------------------------------------

    draw([low, high]) {
      const whole = high - low >= 1;
      this.plot.setAttribute("viewBox", `${low * FIELD} 0 ${(high - low) * FIELD} ${this.height}`);
      if (whole) {
        [this.marks.innerHTML, this.over.innerHTML, this.scale.innerHTML] = this.original;
      } else {
        if (this.values) this.drawValues(low, high);
        this.placeOver(low, high);
        this.drawAxis(low, high);
      }
      this.reset.disabled = whole;
      this.status.textContent = whole ? "" : this.rangeWords(low, high);
      this.selection = this.cursor = null;
    }

    rangeWords(low, high) {
      if (this.unit === "s") return `${seconds(low * this.end)} to ${seconds(high * this.end)}`;
      if (this.unit !== "step")
        return [low, high].map((x) => `${Number((x * this.end).toPrecision(4))} ${this.unit}`).join(" to ");
      const last = Math.min(this.end, Math.ceil(high * this.end)) - 1;
      return `steps ${count(Math.floor(low * this.end))} to ${count(last)} of ${count(this.end)}`;
    }

    // Columns from `low` to `high`, and one more on each side, each with the worst of its values:
    // [where columns begin, rows of values].
    worst(low, high) {
      const first = clamp(Math.floor(low * this.columns) - 1, 0, this.columns - 1);
      const stop = clamp(Math.ceil(high * this.columns) + 1, first + 1, this.columns);
      const shown = Math.min(stop - first, COLUMNS + 2);
      const begins = Array.from({ length: shown + 1 }, (_, i) =>
        first + Math.round((i * (stop - first)) / shown));
      const rows = this.rows.map((_, row) => {
        const worst = new Float64Array(shown);
        for (let i = 0; i < shown; i++)
          for (let column = begins[i]; column < begins[i + 1]; column++)
            worst[i] = Math.max(worst[i], this.values[row * this.columns + column]);
        return worst;
      });
      return [begins, rows];
    }

    drawValues(low, high) {
      const [begins, rows] = this.worst(low, high);
      this.marks.innerHTML = this.original[0];
      if (this.figure.dataset.drawing === "heat") this.drawHeat(begins, rows);
      else this.drawLines(begins, rows);
    }

    drawHeat(begins, rows) {
      const heat = this.marks.querySelector(".heat");
      const rowHeight = this.height / rows.length;
      heat.setAttribute("transform", `scale(${FIELD / this.columns} ${rowHeight})`);
      heat.replaceChildren();
      const shapes = Array.from({ length: LEVELS + 1 }, () => "");
      rows.forEach((values, row) => {
        for (let i = 0; i < values.length; i++) {
          const level = Math.round(clamp(values[i] / this.top, 0, 1) * LEVELS);
          const width = begins[i + 1] - begins[i];
          if (level) shapes[level] += `M${begins[i]} ${row}h${width}v1h${-width}z`;
        }
      });
      shapes.forEach((d, level) => d && element("path", { class: `heat-${level}`, d }, heat));
    }

    drawLines(begins, rows) {
      const x = (i) => ((begins[i] + begins[i + 1]) / 2 / this.columns) * FIELD;
      const y = (value) => this.height * (1 - Math.min(value / this.top, 1));
      const points = rows.map((values) => Array.from(values, (value, i) => `${x(i)},${y(value)}`));
      const band = this.marks.querySelector(".band");
      if (band) band.setAttribute("points", [...points[2], ...points[0].reverse()].join(" "));
      const lines = this.marks.querySelectorAll("polyline");
      (band ? [points[1]] : points).forEach((line, i) => lines[i].setAttribute("points", line.join(" ")));
      const longest = rows[0].map((_, i) => Math.max(...rows.map((values) => values[i])));
      this.over.replaceChildren();
      this.arrows = [];
      longest.forEach((value, i) => {
        if (value <= this.top) return;
        const place = element("svg", { overflow: "visible" }, this.over);
        element("path", { class: "beyond", d: "M-4 0h8l-4 -7z" }, place);
        this.arrows.push(x(i) / FIELD);
      });
    }

    placeOver(low, high) {
      const lines = this.figure.dataset.drawing === "lines";
      if (!lines) this.over.innerHTML = this.original[1];
      const places = lines ? this.arrows : this.places;
      [...this.over.children].forEach((mark, i) => {
        const place = (places[i] - low) / (high - low);
        if (place < 0 || place > 1) mark.setAttribute("visibility", "hidden");
        else mark.setAttribute("x", `${100 * place}%`);
      });
    }

    drawAxis(low, high) {
      const name = this.scale.querySelector(".axis-name");
      this.scale.replaceChildren();
      element("line", { class: "rule", x1: 0, y1: 0.5, x2: "100%", y2: 0.5 }, this.scale);
      const numbers = ticks(low * this.end, high * this.end, 6, this.unit === "step");
      numbers.forEach((at, i) => {
        const place = `${(100 * (at / this.end - low)) / (high - low)}%`;
        const spare = i % 2 ? " spare" : "";
        element("line", { class: `rule${spare}`, x1: place, y1: 0, x2: place, y2: 4 }, this.scale);
        const text = { class: `tick${spare}`, x: place, y: 17, "text-anchor": "middle" };
        element("text", text, this.scale).textContent = at.toLocaleString("en", { maximumFractionDigits: 9 });
      });
      this.scale.append(name);
    }

    // --- pointer: drag, pinch, wheel, and the value below the pointer -----------------------------

    addPointer() {
      const pointers = new Map();
      let begin = null; // place at which a drag began, and the range then
      const place = (event) => {
        const box = this.field.getBoundingClientRect();
        return clamp((event.clientX - box.left) / box.width, 0, 1);
      };
      this.field.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        this.field.setPointerCapture(event.pointerId);
        pointers.set(event.pointerId, place(event));
        begin = pointers.size === 1 ? { x: place(event), range: this.axis.range } : null;
        if (pointers.size === 2) this.pinched = { x: [...pointers.values()], range: this.axis.range };
      });
      this.field.addEventListener("pointermove", (event) => {
        this.axis.point(this, place(event), event);
        if (!pointers.has(event.pointerId)) return;
        pointers.set(event.pointerId, place(event));
        if (pointers.size === 2) this.pinch([...pointers.values()]);
        else if (begin && (event.pointerType === "touch" && this.axis.zoomed || event.shiftKey))
          this.axis.move(begin.range, begin.x - place(event));
        else if (begin) this.select(begin.x, place(event));
      });
      const end = (event) => {
        const selected = this.selected;
        pointers.delete(event.pointerId);
        begin = null;
        this.select(0, 0);
        if (event.type === "pointerup" && selected) this.axis.setPart(selected);
      };
      this.field.addEventListener("pointerup", end);
      this.field.addEventListener("pointercancel", end);
      this.field.addEventListener("pointerleave", () => this.axis.point(this, null));
      this.field.addEventListener("dblclick", () => this.axis.set(WHOLE));
      this.field.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
        event.preventDefault();
        this.axis.zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event));
      }, { passive: false });
    }

    select(a, b) {
      const [left, right] = a < b ? [a, b] : [b, a];
      const wide = (right - left) * this.field.clientWidth >= 6;
      this.selected = wide ? [left, right] : null;
      this.selection?.remove();
      if (!wide) return;
      this.selection = element("rect", { class: "selection", x: `${100 * left}%`, y: 0,
        width: `${100 * (right - left)}%`, height: this.height }, this.over);
    }

    pinch([a, b]) {
      const [begin, range] = [this.pinched.x, this.pinched.range];
      const width = range[1] - range[0];
      const factor = clamp(Math.abs(begin[0] - begin[1]) / Math.max(Math.abs(a - b), 0.02), 0.1, 10);
      const held = range[0] + ((begin[0] + begin[1]) / 2) * width; // stays between the fingers
      const low = held - ((a + b) / 2) * width * factor;
      this.axis.set([low, low + width * factor]);
    }

    showCursor(place) {
      this.cursor?.remove();
      this.cursor = null;
      if (place === null) return;
      const x = `${100 * place}%`;
      this.cursor = element("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: this.height }, this.over);
    }

    showValue(place, event) {
      this.readout.textContent = "";
      if (place === null || !this.values) return;
      const [low, high] = this.axis.range;
      const at = clamp(low + place * (high - low), 0, 1 - 1e-12);
      const column = Math.floor(at * this.columns);
      const value = (row) => seconds(this.values[row * this.columns + column]);
      const first = Math.floor((column * this.end) / this.columns);
      const last = Math.ceil(((column + 1) * this.end) / this.columns) - 1;
      const steps = last > first ? `steps ${count(first)} to ${count(last)}` : `step ${count(first)}`;
      const box = this.field.getBoundingClientRect();
      const row = Math.floor(clamp((event.clientY - box.top) / this.height, 0, 0.999) * this.rows.length);
      const shown = this.figure.dataset.drawing === "heat" ? [row] : this.rows.keys();
      const words = [...shown].map((i) => `${this.rows[i]} ${value(i)}`);
      this.readout.textContent = `${steps}: ${words.join(", ")}`;
    }

    // --- keys ----------------------------------------------------------------------------------

    onKey(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const actions = {
        "+": () => this.axis.zoom(0.5),
        "=": () => this.axis.zoom(0.5),
        "-": () => this.axis.zoom(2),
        ArrowLeft: () => this.axis.move(this.axis.range, -0.25),
        ArrowRight: () => this.axis.move(this.axis.range, 0.25),
        Home: () => this.axis.set(WHOLE),
        Escape: () => this.axis.set(WHOLE),
        0: () => this.axis.set(WHOLE),
      };
      if (!(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    }
  }

  class Axis {
    constructor() {
      this.range = WHOLE;
      this.charts = [];
    }

    get zoomed() {
      return this.range[1] - this.range[0] < 1;
    }

    set([low, high]) {
      const least = this.charts[0].unit === "step" ? Math.min(1, 4 / this.charts[0].end) : 0.002;
      const width = clamp(high - low, least, 1);
      const middle = clamp((low + high) / 2, width / 2, 1 - width / 2);
      this.range = width >= 1 ? WHOLE : [middle - width / 2, middle + width / 2];
      for (const chart of this.charts) chart.draw(this.range);
    }

    setPart([left, right]) { // of what is shown
      const [low, high] = this.range;
      this.set([low + left * (high - low), low + right * (high - low)]);
    }

    zoom(factor, place = 0.5) {
      const [low, high] = this.range;
      const held = low + place * (high - low);
      this.set([held - place * (high - low) * factor, held + (1 - place) * (high - low) * factor]);
    }

    move([low, high], share) {
      const by = clamp(share * (high - low), -low, 1 - high);
      this.set([low + by, high + by]);
    }

    point(from, place, event) {
      for (const chart of this.charts) chart.showCursor(place);
      from.showValue(place, event);
    }
  }

  const steps = new Axis();
  for (const figure of document.querySelectorAll("figure.chart")) {
    const axis = figure.dataset.unit === "step" ? steps : new Axis();
    axis.charts.push(new Chart(figure, axis));
  }
  // report.html#steps=100-200 opens on these steps.
  const asked = /^#steps=(\d+)-(\d+)$/.exec(location.hash);
  if (asked && steps.charts.length) {
    const end = steps.charts[0].end;
    steps.set([Number(asked[1]) / end, (Number(asked[2]) + 1) / end]);
  }
})();

// Small charts in SVG, drawn from scratch each time: a line, a strip of rounds, bars.

const WIDTH = 300;
const FOOT = 14; // for words below the axis

function draw(svg, marks, words) {
  svg.replaceChildren(...marks.map(([name, attributes, text]) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }));
  svg.setAttribute("aria-label", words);
}

function heightOf(svg) { return svg.viewBox.baseVal.height; }

function axis(y) { return ["line", { class: "axis", x1: 0, x2: WIDTH, y1: y, y2: y }]; }

export function drawLine(svg, values, words) {
  const height = heightOf(svg) - 1;
  const shown = thinned(values, WIDTH / 2);
  const most = Math.max(1, ...shown) * 1.1;
  const step = WIDTH / Math.max(shown.length - 1, 1);
  const points = shown.map((value, at) => `${(at * step).toFixed(1)},${(height * (1 - value / most)).toFixed(1)}`);
  const marks = [axis(height), ["polyline", { class: "line", points: points.join(" ") }]];
  if (shown.length) marks.push(["text", { class: "end", x: WIDTH, y: height - 4 }, `0 to ${most.toFixed(0)}`]);
  draw(svg, marks, words);
}

function thinned(values, most) {
  const every = Math.ceil(values.length / most);
  if (every <= 1) return values;
  const means = [];
  for (let at = 0; at < values.length; at += every) {
    const part = values.slice(at, at + every);
    means.push(part.reduce((sum, value) => sum + value, 0) / part.length);
  }
  return means;
}

export function drawRounds(svg, rounds, words) {
  const height = heightOf(svg) - 1, width = 6;
  const shown = rounds.slice(-WIDTH / width);
  const unit = height / Math.max(4, ...shown.map((origins) => origins.length));
  const marks = [axis(height)];
  shown.forEach((origins, at) => {
    const x = WIDTH - (shown.length - at) * width;
    origins.forEach((origin, index) => marks.push(["rect", {
      class: origin, x, y: (height - (index + 1) * unit + 0.5).toFixed(1), width: width - 1, height: Math.max(unit - 1, 0.5).toFixed(1),
    }]));
  });
  draw(svg, marks, words);
}

// bars: [{name, value, shown}], values from 0 to `most`
export function drawBars(svg, bars, most, words) {
  const bottom = heightOf(svg) - FOOT, top = 12;
  const slot = Math.min(WIDTH / Math.max(bars.length, 4), 75);
  const marks = [axis(bottom)];
  if (!bars.length) marks.push(["text", { x: 0, y: bottom - 4 }, "no drafts"]);
  bars.forEach((bar, at) => {
    const x = at * slot + slot / 2, height = most ? ((bottom - top) * bar.value) / most : 0;
    marks.push(["rect", { class: "accepted", x: (x - slot * 0.3).toFixed(1), width: (slot * 0.6).toFixed(1), y: (bottom - height).toFixed(1), height: height.toFixed(1) }]);
    marks.push(["text", { class: "middle", x, y: (bottom - height - 3).toFixed(1) }, bar.shown]);
    marks.push(["text", { class: "middle", x, y: heightOf(svg) - 3 }, bar.name]);
  });
  draw(svg, marks, words);
}

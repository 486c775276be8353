// Curves of losses: of a node, training as a line and validation as a line with its points; of a run, the median.
import { count, fit, loss, say, shape } from "./words.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [46, 12, 10, 24];

export function drawLoss(svg, text, report) {
  const { training, validation } = report.curve;
  if (!drawCurves(svg, training, validation, "No inner steps yet")) {
    say(text, "No inner steps in this process yet.");
    return;
  }
  const first = report.validation_loss_first === null ? "" : ` (first ${loss(report.validation_loss_first)})`;
  say(text, `Round ${report.round}: training ${loss(report.loss)}, validation ${loss(report.validation_loss)}${first}.`);
}

// Points are [x, loss], from x = `begin` on, on a drawing `ratio` times as high as wide; false, and `nothing` is written,
// where there are none.
export function drawCurves(svg, line, marked, nothing, begin = 0, ratio = 0.52) {
  const [width, height] = fit(svg, ratio);
  const all = [...line, ...marked];
  if (all.length === 0) {
    svg.replaceChildren(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, nothing));
    return false;
  }
  const values = all.map((point) => point[1]);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max((high - low) * 0.08, 0.005);
  [low, high] = [low - room, high + room];
  const last = Math.max(...all.map((point) => point[0]), begin + 1);
  const x = (steps) => LEFT + ((steps - begin) / (last - begin)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (height - TOP - BOTTOM);
  const parts = [];
  const step = nice((high - low) / 5);
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
    parts.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    const label = value.toFixed(Math.max(0, Math.ceil(-Math.log10(step))));
    parts.push(shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, label));
  }
  const stride = nice((last - begin) / (width / 100));
  for (let steps = Math.ceil(begin / stride) * stride; steps <= last; steps += stride) {
    parts.push(shape("text", { x: x(steps), y: height - 6, "text-anchor": "middle" }, count(steps)));
  }
  const path = (points) => points.map(([steps, value]) => `${x(steps).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  parts.push(shape("polyline", { class: "curve", points: path(line) }));
  parts.push(shape("polyline", { class: "curve v", points: path(marked) }));
  for (const [steps, value] of marked.slice(-40)) parts.push(shape("circle", { class: "mark", cx: x(steps), cy: y(value), r: 2.6 }));
  svg.replaceChildren(...parts);
  return true;
}

// The next of 1, 2, 5, 10, … at or above `raw`.
function nice(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
}

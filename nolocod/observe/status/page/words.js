// Figures and elements for people. What a peer wrote reaches the page as text only: nothing here parses HTML.

export const REACHABLE = { public: "directly", cone: "by hole punching", symmetric: "through relays", client: "by nobody" };

export const short = (peer) => peer.slice(-8);

export function amount(size) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 999.5) return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1000;
  }
  return `${Number(size.toPrecision(3))} TB`;
}

export function count(number) {
  if (number === null) return "–";
  for (const unit of ["", "k", "M", "G"]) {
    if (number < 999.5) return `${Number(number.toPrecision(3))}${unit}`;
    number /= 1000;
  }
  return `${Number(number.toPrecision(3))}T`;
}

export function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

export const loss = (value) => (value === null ? "–" : value.toFixed(4));

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

// Text that is set only when it differs, so that a screen reader is told of changes and not of every second.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A drawing as wide as there is room, so that its text is as large as the page's. Gives width and height.
export function fit(svg, ratio) {
  const width = Math.max(svg.clientWidth, 240);
  const height = Math.round(Math.max(width * ratio, 220));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return [width, height];
}

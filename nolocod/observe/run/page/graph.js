// The swarm as a graph: members on rings, by how others reach them, who is reached through which relay, and who exchanged lately.
import { duration, fit, say, shape, short } from "./words.js";

const RINGS = [ // how a member is reached, from the inside out
  ["directly", ["public"]],
  ["by hole punching", ["cone"]],
  ["through relays", ["symmetric"]],
  ["by nobody, or not known", ["client", null]],
];
const NAMED = 24; // with more members names would lie on each other
const pen = document.createElement("canvas").getContext("2d"); // measures texts
pen.font = "11px system-ui, sans-serif";
const FADES = 120; // seconds after which an exchange is drawn a third as strong

export function drawGraph(svg, text, { members, known, exchanges }) {
  const [width, height] = fit(svg, svg.clientWidth < 500 ? 1.1 : 0.62);
  const named = members.length <= NAMED;
  const size = members.length > 200 ? 3 : members.length > 60 ? 5 : 8;
  const centre = [width / 2, height / 2 + 4];
  const room = [width / 2 - (named ? Math.min(60, width / 6) : 24), height / 2 - 34];
  const rings = RINGS.map(([name, kinds]) => [name, members.filter((one) => kinds.includes(one.nat))]).filter(([, here]) => here.length);
  const parts = [], lines = [], nodes = [], titles = [], place = new Map(), relays = new Set();
  const taken = [[-Infinity, 0, -Infinity, Infinity], [width, Infinity, -Infinity, Infinity]]; // left, right, top, bottom
  rings.forEach(([name, here], number) => {
    const alone = here.length === 1 && number === 0; // in the middle
    const share = alone ? 0 : rings.length === 1 ? 0.8 : 0.36 + (0.64 * number) / (rings.length - 1);
    const [rx, ry] = [room[0] * share, room[1] * share];
    if (!alone) parts.push(shape("ellipse", { class: "ring", cx: centre[0], cy: centre[1], rx, ry }));
    const dense = (2.5 * (rx + ry)) / 2 / here.length; // so that they do not lie on each other
    here.forEach((one, index) => {
      const angle = ((index + (number % 2 ? 0.4 : 0.5)) / here.length - 0.25) * 2 * Math.PI; // none at the top: a ring's name is there
      place.set(one.peer_id, [centre[0] + rx * Math.cos(angle), centre[1] + ry * Math.sin(angle), angle, alone ? size : Math.max(Math.min(size, dense), 1)]);
    });
    if (alone) return;
    const [title, base] = [`reached ${name}`, centre[1] - ry - 5];
    taken.push([centre[0] - 3 * title.length, centre[0] + 3 * title.length, base - 10, base + 3]);
    titles.push(shape("text", { class: "title", x: centre[0], y: base, "text-anchor": "middle" }, title));
  });
  for (const [x, y, , radius] of place.values()) taken.push([x - radius, x + radius, y - radius, y + radius]);
  for (const member of members) {
    const [x, y, , radius] = place.get(member.peer_id);
    const kind = ["training", "finished"].includes(member.state) ? member.state : "other";
    const title = shape("title", {}, `${[short(member.peer_id), member.name].filter(Boolean).join(" ")}, ${member.state}, round ${member.round}`);
    const circle = shape("circle", { cx: x, cy: y, r: member.relays ? radius * 1.25 : radius });
    const label = named ? beside(place.get(member.peer_id), called(member), taken) : [];
    nodes.push(shape("g", { class: `member ${kind}${member.answered ? "" : " told"}` }, title, circle, ...label));
    if (member.nat === "public") continue;
    for (const relay of member.via.filter((peer) => place.has(peer))) {
      relays.add(relay);
      const [to_x, to_y] = place.get(relay);
      parts.push(shape("line", { class: "edge relayed", x1: x, y1: y, x2: to_x, y2: to_y }));
    }
  }
  for (const [offerer, answerer, age] of exchanges) {
    if (!place.has(offerer) || !place.has(answerer)) continue;
    const [[x1, y1], [x2, y2]] = [place.get(offerer), place.get(answerer)];
    const bend = [0, 1].map((axis) => 0.4 * (axis ? y1 + y2 : x1 + x2) + 0.2 * centre[axis]); // away from the names
    const strength = Math.max(Math.exp(-age / FADES), 0.1).toFixed(2);
    lines.push(shape("path", { class: "edge exchanged", d: `M${x1} ${y1}Q${bend} ${x2} ${y2}`, "stroke-opacity": strength }));
  }
  svg.replaceChildren(...parts, ...lines.reverse(), ...titles, ...nodes); // the newest on top
  if (members.length === 0) {
    svg.replaceChildren(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nobody has answered yet"));
  }
  const more = known > members.length ? ` ${members.length} are drawn.` : "";
  const carried = relays.size ? ` ${relays.size} of them ${relays.size === 1 ? "carries" : "carry"} for others.` : "";
  const told = rings.map(([name, here]) => `${here.length} ${name}`).join(", ");
  const late = lines.length ? ` ${lines.length} ${lines.length === 1 ? "pair" : "pairs"} exchanged in the last hour, the last one ${duration(exchanges[0][2])} ago.` : "";
  say(text, `${known} ${known === 1 ? "member" : "members"}${told && ", reached "}${told}.${carried}${late}${more}`);
}

// A text where it hides no node and no other text, as far outside of its ring as can be; nothing where there is no such place.
function beside([x, y, angle, radius], text, taken) {
  const out = Math.cos(angle) < 0 ? -1 : 1, wide = pen.measureText(text).width + 2;
  const spots = [[out * (radius + 7), 4, out], [0, radius + 15, 0], [0, -radius - 6, 0], [-out * (radius + 7), 4, -out]];
  if (Math.abs(Math.cos(angle)) < 0.3) spots.unshift(...spots.splice(Math.sin(angle) < 0 ? 2 : 1, 1));
  for (const [right, down, side] of spots) {
    const left = x + right + ((side - 1) / 2) * wide, base = y + down;
    if (taken.some(([from, to, top, bottom]) => left < to && left + wide > from && base - 10 < bottom && base + 3 > top)) continue;
    taken.push([left, left + wide, base - 10, base + 3]);
    return [shape("text", { x: x + right, y: base, "text-anchor": ["end", "middle", "start"][side + 1] }, text)];
  }
  return [];
}

function called({ name, peer_id }) {
  if (!name) return short(peer_id);
  return name.length > 14 ? `${name.slice(0, 13)}…` : name;
}

// The swarm as a graph: members on rings, by how others reach them, who is reached through which relay, and who exchanged lately.
import { fit, say, shape, short } from "./words.js";

const RINGS = [ // share of the radius, and how a member is reached
  [0.34, "public", "directly"],
  [0.64, "cone", "by hole punching"],
  [0.84, "symmetric", "through relays"],
  [1.0, "", "by nobody, or not known"],
];
const NAMED = 24; // with more members names would lie on each other
const MARGIN = 34;

const FADES = 1800; // seconds after which an exchange is at its faintest

export function drawGraph(svg, text, { members, known, exchanges }) {
  const [width, height] = fit(svg, 0.72);
  const centre = [width / 2, height / 2];
  const size = members.length > 200 ? 3 : members.length > 60 ? 5 : 8;
  const parts = [], nodes = [], place = new Map(), told = [];
  for (const [share, kind, name] of RINGS) {
    const here = members.filter((one) => (kind ? one.nat === kind : one.nat === null || one.nat === "client"));
    if (here.length === 0) continue;
    told.push(`${here.length} ${name}`);
    const alone = kind === "public" && here.length === 1;
    const [rx, ry] = alone ? [0, 0] : [(width / 2 - MARGIN) * share, (height / 2 - MARGIN / 2) * share];
    if (!alone) parts.push(shape("ellipse", { class: "ring", cx: centre[0], cy: centre[1], rx, ry }));
    here.forEach((one, index) => {
      const angle = ((index + share / 2) / here.length) * 2 * Math.PI - Math.PI / 2;
      place.set(one.peer_id, [centre[0] + rx * Math.cos(angle), centre[1] + ry * Math.sin(angle)]);
    });
  }
  const relays = new Set();
  for (const member of members) {
    const [x, y] = place.get(member.peer_id);
    const kind = ["training", "finished"].includes(member.state) ? member.state : "other";
    const circle = shape("circle", { cx: x, cy: y, r: member.relays ? size + 2 : size });
    const label = members.length <= NAMED ? [shape("text", { x, y: y + size + 13, "text-anchor": "middle" }, short(member.peer_id))] : [];
    const title = shape("title", {}, `${[short(member.peer_id), member.name].filter(Boolean).join(" ")}, ${member.state}, round ${member.round}`);
    nodes.push(shape("g", { class: `member ${kind}${member.answered ? "" : " told"}` }, title, circle, ...label));
    if (member.nat === "public") continue;
    for (const relay of member.via.filter((peer) => place.has(peer))) {
      relays.add(relay);
      const [to_x, to_y] = place.get(relay);
      parts.push(shape("line", { class: "edge relayed", x1: x, y1: y, x2: to_x, y2: to_y }));
    }
  }
  let drawn = 0;
  for (const [offerer, answerer, age] of exchanges) {
    if (!place.has(offerer) || !place.has(answerer)) continue;
    const [[x1, y1], [x2, y2]] = [place.get(offerer), place.get(answerer)];
    const opacity = Math.max(1 - age / FADES, 0.2).toFixed(2);
    parts.push(shape("line", { class: "edge exchanged", x1, y1, x2, y2, "stroke-opacity": opacity }));
    drawn += 1;
  }
  svg.replaceChildren(...parts, ...nodes);
  if (members.length === 0) {
    svg.replaceChildren(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nobody has answered yet"));
  }
  const more = known > members.length ? ` ${members.length} are drawn.` : "";
  const carried = relays.size ? ` ${relays.size} of them ${relays.size === 1 ? "carries" : "carry"} for others.` : "";
  const reached = told.length ? `, reached ${told.join(", ")}` : "";
  const lately = drawn ? ` ${drawn} late ${drawn === 1 ? "exchange is" : "exchanges are"} drawn.` : "";
  say(text, `${known} ${known === 1 ? "member" : "members"}${reached}.${carried}${lately}${more}`);
}

// The swarm as this node knows it: itself in the middle, its peers around it, and the last exchanges, which fade.
import { fit, say, shape, short } from "./words.js";

const SHOWN = 16; // more names would lie on each other
const MARGIN = 76; // beside the ring, for names
const FADES = 120; // seconds

export function drawSwarm(svg, text, report) {
  const [width, height] = fit(svg, 0.72);
  const centre = [width / 2, height / 2];
  const partners = new Set([report.exchanging_with, ...report.exchanges.map((one) => one.partner)]);
  const ranked = [...report.peers].sort((a, b) => partners.has(b.peer_id) - partners.has(a.peer_id) || (b.reach !== null) - (a.reach !== null));
  const peers = ranked.slice(0, SHOWN).sort((a, b) => (a.peer_id < b.peer_id ? -1 : 1));
  const place = new Map(peers.map((peer, index) => {
    const angle = (index / peers.length) * 2 * Math.PI - (peers.length > 2 ? Math.PI / 2 : 0);
    return [peer.peer_id, [centre[0] + (width / 2 - MARGIN) * Math.cos(angle), centre[1] + (height / 2 - 34) * Math.sin(angle)]];
  }));
  const edges = [], arcs = [], nodes = [];
  for (const peer of peers) {
    const [x, y] = place.get(peer.peer_id);
    if (peer.reach) edges.push(shape("line", { class: `edge ${peer.reach}`, x1: centre[0], y1: centre[1], x2: x, y2: y }));
    const kind = peer.banned_for !== null ? "banned" : peer.reach ? "on" : "off";
    nodes.push(dot(x, y, 9, kind, short(peer.peer_id), (x - centre[0]) / (width / 2 - MARGIN), y < centre[1]));
  }
  const told = new Set();
  for (const one of report.exchanges) {
    if (one.outcome === "busy" || one.partner === report.exchanging_with || one.age > FADES || told.has(one.partner) || !place.has(one.partner)) continue;
    told.add(one.partner);
    const kind = one.outcome === "committed" ? "done" : "failed";
    arcs.push(arc(centre, place.get(one.partner), kind, 1 - (one.age / FADES) * 0.85));
  }
  if (place.has(report.exchanging_with)) arcs.push(arc(centre, place.get(report.exchanging_with), "live", 1));
  svg.replaceChildren(...edges, ...arcs, ...nodes, dot(...centre, 13, "self", "this node", 0, false));
  const direct = report.peers.filter((peer) => peer.reach && peer.reach !== "relayed").length;
  const relayed = report.peers.filter((peer) => peer.reach === "relayed").length;
  const now = report.exchanging_with ? ` Exchanging with ${short(report.exchanging_with)} now.` : "";
  const banned = report.peers.filter((peer) => peer.banned_for !== null).length;
  const shut = banned ? `, ${banned} banned` : "";
  const more = report.peers.length > SHOWN ? ` ${SHOWN} are drawn.` : "";
  say(text, `${report.peers.length} ${report.peers.length === 1 ? "peer" : "peers"}: ${direct} connected directly, ${relayed} through relays${shut}.${more}${now}`);
}

// A node and its name, which stands outside of the ring: beside it where `side` is far from 0, else above or below.
function dot(x, y, radius, kind, name, side, above) {
  const beside = Math.abs(side) > 0.3;
  const [dx, dy] = beside ? [Math.sign(side) * (radius + 5), 4] : [0, above ? -radius - 6 : radius + 14];
  const anchor = beside ? (side > 0 ? "start" : "end") : "middle";
  return shape("g", { class: `node ${kind}` }, shape("circle", { cx: x, cy: y, r: radius }), shape("text", { x: x + dx, y: y + dy, "text-anchor": anchor }, name));
}

function arc([from_x, from_y], [x, y], kind, opacity) {
  const [bend_x, bend_y] = [(from_x + x) / 2 + (y - from_y) * 0.16, (from_y + y) / 2 - (x - from_x) * 0.16];
  return shape("path", { class: `arc ${kind}`, opacity, d: `M ${from_x} ${from_y} Q ${bend_x} ${bend_y} ${x} ${y}` });
}

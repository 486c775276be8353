// The swarm as this node knows it: itself in the middle, its peers around it, and the last exchanges, which fade.
import { say, shape, short } from "./words.js";

const [CENTRE_X, CENTRE_Y, WIDE, HIGH] = [220, 155, 165, 118];
const SHOWN = 24;
const FADES = 120; // seconds

export function drawSwarm(svg, text, report) {
  const partners = new Set([report.exchanging_with, ...report.exchanges.map((one) => one.partner)]);
  const ranked = [...report.peers].sort((a, b) => partners.has(b.peer_id) - partners.has(a.peer_id) || (b.reach !== null) - (a.reach !== null));
  const peers = ranked.slice(0, SHOWN).sort((a, b) => (a.peer_id < b.peer_id ? -1 : 1));
  const place = new Map(peers.map((peer, index) => {
    const angle = (index / peers.length) * 2 * Math.PI - Math.PI / 2;
    return [peer.peer_id, [CENTRE_X + WIDE * Math.cos(angle), CENTRE_Y + HIGH * Math.sin(angle)]];
  }));
  const edges = [], arcs = [], nodes = [];
  for (const peer of peers) {
    const [x, y] = place.get(peer.peer_id);
    if (peer.reach) edges.push(shape("line", { class: `edge ${peer.reach}`, x1: CENTRE_X, y1: CENTRE_Y, x2: x, y2: y }));
    const kind = peer.banned_for !== null ? "banned" : peer.reach ? "on" : "off";
    nodes.push(dot(x, y, 9, kind, short(peer.peer_id)));
  }
  const told = new Set();
  for (const one of report.exchanges) {
    if (one.outcome === "busy" || one.age > FADES || told.has(one.partner) || !place.has(one.partner)) continue;
    told.add(one.partner);
    const kind = one.outcome === "committed" ? "done" : "failed";
    arcs.push(arc(place.get(one.partner), kind, 1 - (one.age / FADES) * 0.85));
  }
  if (place.has(report.exchanging_with)) arcs.push(arc(place.get(report.exchanging_with), "live", 1));
  svg.replaceChildren(...edges, ...arcs, ...nodes, dot(CENTRE_X, CENTRE_Y, 13, "self", "this node"));
  const straight = report.peers.filter((peer) => peer.reach && peer.reach !== "relayed").length;
  const relayed = report.peers.filter((peer) => peer.reach === "relayed").length;
  const now = report.exchanging_with ? ` Exchanging with ${short(report.exchanging_with)} now.` : "";
  const more = report.peers.length > SHOWN ? ` ${SHOWN} are drawn.` : "";
  say(text, `${report.peers.length} peers: ${straight} connected straight, ${relayed} through relays.${more}${now}`);
}

function dot(x, y, radius, kind, name) {
  return shape("g", { class: `node ${kind}` }, shape("circle", { cx: x, cy: y, r: radius }), shape("text", { x, y: y + radius + 13 }, name));
}

function arc([x, y], kind, opacity) {
  const [bend_x, bend_y] = [(CENTRE_X + x) / 2 + (y - CENTRE_Y) * 0.16, (CENTRE_Y + y) / 2 - (x - CENTRE_X) * 0.16];
  return shape("path", { class: `arc ${kind}`, opacity, d: `M ${CENTRE_X} ${CENTRE_Y} Q ${bend_x} ${bend_y} ${x} ${y}` });
}

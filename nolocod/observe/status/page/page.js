// Shows each report that /events sends. The report is the whole truth: nothing is kept here but the theme.
import { drawLoss } from "./loss.js";
import { facts, rows, themes } from "./parts.js";
import { settings } from "./settings.js";
import { drawSwarm } from "./swarm.js";
import { REACHABLE, amount, count, duration, element, loss, say, short } from "./words.js";

const WARNS = 600; // seconds for which an error is a warning
const CONNECTED = { direct: "by us", inbound: "by the peer", punched: "by hole punching", relayed: "by a relay" };
const one = (id) => document.getElementById(id);

function show(report) {
  document.title = `${report.state} · ${report.run_name || "nolocod"}`;
  say(one("run"), report.run_name);
  say(one("node"), report.peer_id);
  say(one("state").querySelector("strong"), report.state);
  say(one("state").querySelector(".waits"), report.text_trouble ? `no new text: ${report.text_trouble}` : report.waiting_for ? `waiting for ${report.waiting_for}` : "");
  one("state").querySelector(".dot").className = `dot ${report.state}`;
  say(one("since"), `for ${duration(report.since)}`);
  facts(one("figures"), {
    "Round": report.round,
    "Loss": loss(report.loss),
    "Validation": loss(report.validation_loss),
    "Tokens/s": count(report.tokens_per_second),
    "Inner steps": count(report.inner_steps),
    "Paired / solo": `${report.outer_paired} / ${report.outer_solo}`,
    "In training steps": `${Math.round(report.utilisation * 100)} %`,
    ...(report.mfu === null ? {} : { "MFU": `${Math.round(report.mfu * 100)} %` }),
  });
  drawLoss(one("loss"), one("loss-text"), report);
  drawSwarm(one("swarm"), one("swarm-text"), report);
  warn(report.errors);
  rows(one("peers"), report.peers.map(peerRow), "Nobody yet");
  rows(one("exchanges"), report.exchanges.map(exchangeRow), "None yet");
  facts(one("given"), gave(report));
  facts(one("line"), budgets(report.allowance));
  facts(one("limits"), { ...machine(report.allowance), ...taken(report) });
  facts(one("reach"), reach(report));
  const checkpoint = report.checkpoint_round === null ? "no checkpoint yet" : `checkpoint of round ${report.checkpoint_round}`;
  say(one("process"), `nolocod ${report.version}, process ${report.pid}, up ${duration(report.uptime)}, ${checkpoint}`);
}

function peerRow(peer) {
  const banned = peer.banned_for !== null;
  const reputation = banned ? `banned for ${duration(peer.banned_for)}` : peer.reputation === null ? "–" : peer.reputation.toFixed(2);
  return [
    short(peer.peer_id), peer.state || "connected", peer.round ?? "–", count(peer.tokens), loss(peer.loss || null), CONNECTED[peer.reach] ?? "–",
    REACHABLE[peer.nat] ?? "–", element("span", banned ? { class: "bad" } : {}, reputation), duration(peer.age),
  ];
}

function exchangeRow(row) {
  const kind = row.outcome === "committed" ? "good" : row.outcome === "busy" ? "" : "bad";
  const outcome = [row.outcome.replace("_", " "), row.error, row.reason].filter(Boolean).join(" · ");
  const spread = row.spread === null ? "–" : row.spread.toPrecision(3);
  return [short(row.partner), element("span", { class: kind }, outcome), amount(row.sent), amount(row.received), `${row.seconds.toFixed(2)} s`, spread, duration(row.age)];
}

function gave({ given, contributors }) {
  if (given === null) return { "Tokens": "none yet" };
  const place = contributors.findIndex((one) => one.peer_id === given.peer_id) + 1;
  const told = { "Tokens": count(given.tokens), "Time": duration(given.seconds), "Exchanges": count(given.exchanges), "Partners": given.partners };
  if (given.name) told["Name"] = given.name;
  if (place) told["Place"] = `${place} of those that this node knows`;
  return told;
}

function budgets(allowed) {
  const rate = (now, most) => `${amount(now)}/s` + (most === null ? "" : ` of ${amount(most)}/s`);
  const told = { "Up": rate(allowed.sending, allowed.max_upload), "Down": rate(allowed.receiving, allowed.max_download) };
  told["This month"] = amount(allowed.month_used) + (allowed.monthly_budget === null ? "" : ` of ${amount(allowed.monthly_budget)}`);
  told["Trains"] = (allowed.hours.join(", ") || "at all hours") + (allowed.pause_on_battery ? ", not on battery" : "");
  const after = allowed.resumes_in === null ? "" : `; resumes in ${duration(allowed.resumes_in)}`;
  if (allowed.paused) told["Paused"] = allowed.paused_why + after;
  return told;
}

function machine(allowed) {
  const measured = [[allowed.temperature, "°C"], [allowed.power, "W"]].filter(([value]) => value !== null);
  const share = `${Math.round(allowed.share * 100)} % of the time`;
  const told = { "Computes": [share, allowed.share_why, ...measured.map(([value, unit]) => `${value} ${unit}`)].filter(Boolean).join(", ") };
  return { ...told, ...allowed.limits };
}

function taken({ memory, text_wait: waited }) {
  const parts = Object.entries(memory).sort(([, a], [, b]) => b - a).map(([part, size]) => `${part} ${amount(size)}`).join(", ");
  return { ...(parts ? { "Memory": parts } : {}), "Waited for text": duration(waited) };
}

function reach({ reach: found, addresses }) {
  const told = { "Reachable": REACHABLE[found.kind] ?? "not known yet" };
  if (found.why) told["Because"] = found.why;
  if (found.relays.length) told["Relays"] = found.relays.map((relay) => short(relay.peer_id)).join(", ");
  if (found.punches) told["Punched"] = `${found.punched} of ${found.punches} connections`;
  const carried = found.carried;
  told["Carries"] = carried.reservations || carried.circuits ? `${carried.reservations} reservations, ${carried.open} circuits now, ${amount(carried.bytes)} in all` : "nothing for others";
  told["Addresses"] = addresses.join("\n") || "–";
  return told;
}

function warn(errors) {
  const recent = errors.filter((error) => error.age < WARNS);
  const seen = new Map();
  for (const error of recent) if (!seen.has(error.code + error.message)) seen.set(error.code + error.message, error);
  one("warnings").hidden = seen.size === 0;
  const items = [...seen.values()].map((error) => {
    const head = element("strong", {}, `${error.code} ${error.title}`);
    const ago = element("span", { class: "quiet" }, ` ${duration(error.age)} ago`);
    const todo = error.remedy ? [element("p", {}, element("strong", {}, "What to do: "), error.remedy)] : [];
    return element("li", {}, element("p", {}, head, `: ${error.message}`, ago), ...todo);
  });
  one("warnings").querySelector("ul").replaceChildren(...items);
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (message) => {
    link("live", false);
    show(JSON.parse(message.data));
  };
  source.onerror = () => {
    link("no answer from the node; what is below is old", true);
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  };
}

function link(text, lost) {
  say(one("link"), text);
  one("link").className = lost ? "lost" : "";
  one("main").className = lost ? "old" : "";
  if (lost) one("state").querySelector(".dot").className = "dot lost";
}

themes(one("theme"));
settings(one("settings"), one("answer"));
listen();

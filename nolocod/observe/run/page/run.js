// Asks for run.json again and again and shows it: the report is the whole truth.
import { drawGraph } from "./graph.js";
import { drawCurves } from "./loss.js";
import { facts, rows, themes } from "./parts.js";
import { REACHABLE, count, duration, element, loss, say, short } from "./words.js";

const EVERY = 3000; // milliseconds
const LISTED = 30; // members; run.json has more
const one = (id) => document.getElementById(id);

function show(report) {
  const training = report.states.training ?? 0;
  const over = !training && (report.states.finished ?? 0) > 0;
  const state = report.known === 0 ? "nobody there" : over ? "finished" : training ? "training" : "not training";
  document.title = `${report.run_name} · ${state}`;
  say(one("run"), report.run_name);
  say(one("id"), report.run_id.slice(0, 12));
  say(one("state").querySelector("strong"), state);
  one("state").querySelector(".dot").className = `dot ${state}`;
  say(one("since"), `watched for ${duration(report.watched)}`);
  const goal = report.rounds ? ` / ${count(report.rounds)}` : "";
  facts(one("figures"), {
    "Members": report.known,
    "Training": training,
    "Round": `${report.round}${goal}`,
    "Loss": loss(report.loss),
    "Tokens/s": count(report.tokens_per_second),
    "Replica tokens": count(report.tokens),
    "Tokens seen": count(report.watched_tokens),
    "Left": report.eta === null ? "–" : duration(report.eta),
  });
  progress(report.progress);
  const begin = report.curve.length ? report.curve[0][0] : 0;
  const drawn = drawCurves(one("loss"), report.curve, [], "Nobody has told a loss yet", begin > report.round / 4 ? begin : 0, one("loss").clientWidth < 500 ? 0.87 : 0.52);
  say(one("loss-text"), drawn ? `Round ${report.round}: ${loss(report.loss)}, seen from round ${begin} on.` : "No loss is known yet.");
  drawGraph(one("swarm"), one("swarm-text"), report);
  for (const kind of ["finished", "other", "relayed", "exchanged"]) {
    document.querySelector(`.key .${kind}`).hidden = !document.querySelector(`#swarm .${kind}`);
  }
  const listed = [...report.members].sort((a, b) => b.tokens_per_second - a.tokens_per_second).slice(0, LISTED);
  rows(one("members"), listed.map(memberRow), "Nobody yet");
  const more = report.known - listed.length;
  say(one("more"), more > 0 ? `${more} more members are in run.json.` : "");
  rows(one("given"), report.contributors.slice(0, LISTED).map(givenRow), "Nobody has shown receipts yet");
  const by = `${report.contributed_by} ${report.contributed_by === 1 ? "member" : "members"}`;
  say(one("given-text"), report.contributed_by ? `${count(report.contributed)} tokens by ${by}, counted from receipts that both partners signed.` : "");
  facts(one("reach"), named(report.reachable, (kind) => REACHABLE[kind] ?? "not known"));
  facts(one("releases"), named(report.releases, (release) => release || "not told"));
  say(one("process"), `nolocod ${report.release} watches. The figures are the word of ${report.counted} members; nobody has checked them.`);
}

const named = (counts, name) => Object.fromEntries(Object.entries(counts).map(([key, value]) => [name(key), value]));

function progress(share) {
  const bar = one("progress");
  bar.hidden = share === null;
  if (share === null) return;
  const percent = (share * 100).toFixed(1);
  bar.setAttribute("aria-valuenow", percent);
  bar.firstElementChild.style.width = `${percent}%`;
}

const who = ({ peer_id, name }) => element("span", {}, short(peer_id), " ", element("bdi", {}, name));

function memberRow(member) {
  const reach = REACHABLE[member.nat] ?? "–";
  const via = member.via.length && member.nat !== "public" ? `${reach} (${member.via.map(short).join(", ")})` : reach;
  const state = element("span", member.state === "training" ? { class: "good" } : {}, member.state);
  return [
    who(member), state, via, member.round, loss(member.loss), count(member.tokens), count(member.tokens_per_second),
    member.release || "–", duration(member.age),
  ];
}

function givenRow(given) {
  return [who(given), count(given.tokens), duration(given.seconds), given.partners];
}

async function ask() {
  try {
    const reply = await fetch("run.json");
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    show(await reply.json());
    link("live", false);
  } catch {
    link("no answer from the observer; what is below is old", true);
  }
  setTimeout(ask, EVERY);
}

function link(text, lost) {
  say(one("link"), text);
  one("link").className = lost ? "lost" : "";
  one("main").className = lost ? "old" : "";
}

themes(one("theme"));
ask();

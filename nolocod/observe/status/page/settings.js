// Sets the node's limits, on its own machine. The token goes in a header, which no other web page can make a browser send.
import { element, say } from "./words.js";

const KEYS = [
  "pause", "duty", "max-temperature", "max-power", "hours", "pause-when-used", "pause-when-gpu-used", "pause-on-battery", "pause-on-metered",
  "devices", "threads", "nice",
];

export function settings(form, answer) {
  const { key, value, token } = form.elements;
  key.replaceChildren(...KEYS.map((name) => element("option", {}, name)));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const headers = { Authorization: `Bearer ${token.value.trim()}` };
    try {
      const reply = await fetch("settings", { method: "POST", headers, body: JSON.stringify({ [key.value]: value.value.trim() }) });
      const told = await reply.json();
      say(answer, reply.ok ? `${key.value} is set.` : [told.error, told.remedy].filter(Boolean).join(" "));
    } catch {
      say(answer, "The node does not answer.");
    }
  });
}

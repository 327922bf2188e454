"use strict";
// texts of models and data are only ever added as text
const token = location.hash.slice(1);
const byId = id => document.getElementById(id);
let items = new Map(), pairs = [], mode = "single", place = 0;

async function ask(path, body) {
  const request = { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" };
  if (body) {
    request.method = "POST";
    request.body = JSON.stringify(body);
    request.headers["Content-Type"] = "application/json";
  }
  const reply = await fetch(path, request);
  if (!reply.ok) throw new Error((await reply.json()).error);
  return reply.json();
}

function tell(text) { byId("state").textContent = text; }

function count(counts) { tell(`${counts.responses} responses and ${counts.pairs} pairs are marked`); }

async function load() {
  const data = await ask("/label/items");
  items = new Map(data.items.map(item => [item.id, item]));
  pairs = data.pairs;
  count(data.counts);
  show();
}

function queue() { return mode === "single" ? [...items.values()] : pairs; }

function show() {
  const all = queue();
  // the first from here on that has no mark, else this one
  const open = all.findIndex((one, index) => index >= place && one.verdict === null);
  place = open < 0 ? Math.min(place, Math.max(0, all.length - 1)) : open;
  byId("responses").replaceChildren();
  byId("answers").replaceChildren();
  if (!all.length) { byId("prompt").textContent = "Nothing to mark yet."; return; }
  const one = all[place];
  const shown = (mode === "single" ? [one.id] : one.items).map(id => items.get(id));
  byId("prompt").textContent = shown[0].prompt;
  shown.forEach((item, index) => {
    const box = document.createElement("div"), text = document.createElement("div"), head = document.createElement("b");
    box.className = "response";
    text.className = "text";
    head.textContent = mode === "single" ? `reference: ${item.label ?? "none"}` : "AB"[index];
    text.textContent = item.response;
    box.append(head, text);
    byId("responses").append(box);
  });
  const choices = mode === "single"
    ? [["right (1)", "right"], ["wrong (2)", "wrong"]]
    : [["A is better (1)", one.items[0]], ["B is better (2)", one.items[1]]];
  choices.forEach(([title, verdict]) => add(title, () => mark(one, verdict)));
  add("take back (0)", () => mark(one, null));
  add("back", () => { place = Math.max(0, place - 1); step(); });
  add("next (3)", () => { place = Math.min(all.length - 1, place + 1); step(); });
  const known = document.createElement("span");
  known.className = "dim small";
  known.textContent = `${place + 1} of ${all.length}${one.verdict === null ? "" : ", marked"}`;
  byId("answers").append(known);
}

// show exactly the one at `place`, marked or not
function step() {
  const one = queue()[place], verdict = one.verdict;
  one.verdict = null;
  show();
  one.verdict = verdict;
}

function add(title, action) {
  const button = document.createElement("button");
  button.textContent = title;
  button.addEventListener("click", action);
  byId("answers").append(button);
}

async function mark(one, verdict) {
  try {
    const reply = await ask("/label/marks", {
      items: mode === "single" ? [one.id] : one.items, verdict, version: one.version,
    });
    Object.assign(one, { verdict, version: reply.version });
    count(reply.counts);
    if (verdict !== null) place += 1;
    show();
  } catch (error) { tell(error.message); }
}

for (const name of ["single", "double"]) {
  byId(name).addEventListener("click", () => { mode = name; place = 0; show(); });
}
addEventListener("keydown", event => {
  const index = { 1: 0, 2: 1, 0: 2, 3: 4 }[event.key];
  if (index !== undefined && !event.ctrlKey && !event.metaKey) byId("answers").querySelectorAll("button")[index]?.click();
});
load().catch(error => tell(error.message));

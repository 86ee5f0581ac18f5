// Keeps the page of `areax report --serve` up to date: asks for the open sections, and puts in what differs.
"use strict";

const EVERY = 2000; // ms
const SHARE = 10; // it asks again after so many times what an answer took, ...
const LATEST = 10000; // ... or after so many ms
const note = document.getElementById("note");
let stamp = note.dataset.stamp;

// Makes the content of `old` that of `fresh`. Elements that are in both stay, with what is folded, chosen and scrolled.
function update(old, fresh) {
  const theirs = [...fresh.childNodes], mine = [...old.childNodes];
  const alike = mine.length === theirs.length && mine.every((x, i) => x.nodeName === theirs[i].nodeName);
  if (!alike || old.nodeName === "svg") return old.replaceChildren(...theirs);
  mine.forEach((x, i) => {
    if (x.isEqualNode(theirs[i]) || x === document.activeElement) return;
    if (x.nodeType !== Node.ELEMENT_NODE) return x.replaceWith(theirs[i]);
    for (const name of x.getAttributeNames()) if (name !== "open") x.removeAttribute(name);
    for (const { name, value } of theirs[i].attributes) if (name !== "open") x.setAttribute(name, value);
    update(x, theirs[i]);
  });
}

// The server escapes all text; the parser runs no script, and the page's policy allows none but this file.
function put(parts) {
  for (const [id, html] of Object.entries(parts)) {
    update(document.getElementById(id), new DOMParser().parseFromString(html, "text/html").body);
  }
}

async function ask(since, ids) {
  const query = new URLSearchParams({ since });
  for (const id of ids) query.append("open", id);
  const form = document.querySelector("form.choose");
  if (form) for (const [name, value] of new FormData(form)) query.append(name, value);
  const answer = await fetch(`parts?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer.json();
}

async function show(since, ids) {
  try {
    const found = await ask(since, ids);
    put(found.parts);
    return found.stamp;
  } catch (error) {
    note.textContent = `no answer from areax report (${error.message}); the page asks again`;
    return ""; // ask for everything once it answers
  }
}

const opened = () => [...document.querySelectorAll("details.section[open]>div")].map((x) => x.id);

async function poll() {
  const began = performance.now();
  if (!document.hidden) stamp = await show(stamp, opened());
  setTimeout(poll, Math.min(LATEST, Math.max(EVERY, SHARE * (performance.now() - began))));
}

for (const section of document.querySelectorAll("details.section")) {
  section.addEventListener("toggle", () => section.open && show("", [section.lastElementChild.id]));
}
document.addEventListener("change", (event) => event.target.closest("form.choose") && show("", ["samples"]));
document.addEventListener("submit", (event) => event.preventDefault());
setTimeout(poll, EVERY);

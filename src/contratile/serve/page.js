"use strict";
// Names and captions come from the data: they are only ever set as textContent.
const at = (id) => document.getElementById(id);
const takes = { text: document.body.dataset.text === "yes", pictures: document.body.dataset.pictures === "yes" };
const limit = Number(document.body.dataset.limit);
let current = null; // the request under way
let last = null; // repeats the last search, after a change of an option
let preview = "";

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Small pictures, such as icons, are enlarged by a whole number: their pixels stay sharp.
function enlarge(event) {
  const picture = event.target;
  const edge = Math.max(picture.naturalWidth, picture.naturalHeight);
  const small = edge > 0 && edge <= 48;
  picture.classList.toggle("small", small);
  if (small) picture.width = picture.naturalWidth * Math.floor(96 / edge);
  else picture.removeAttribute("width");
}

function drawn(item, withPicture) {
  const row = element("li", item.match ? "match" : "");
  if (withPicture) {
    const frame = element("div", "frame");
    if (item.thumbnail === null) {
      frame.textContent = "no picture";
    } else {
      const picture = element("img", "");
      picture.alt = item.text;
      picture.addEventListener("load", enlarge);
      picture.addEventListener("error", () => frame.replaceChildren("no picture"));
      picture.src = "/thumbnail/" + Number(item.thumbnail);
      frame.append(picture);
    }
    row.append(frame);
  }
  row.append(element("bdi", "text", item.text));
  const score = item.score === null ? "" : item.score.toFixed(3);
  const about = [score, item.name, item.match ? "match" : "", item.split].filter(Boolean).join(" · ");
  row.append(element("bdi", "about", about));
  return row;
}

function show(groups) {
  at("found").replaceChildren();
  let count = 0;
  for (const group of groups) {
    if (group.items.length === 0) continue;
    const pictures = group.kind === "image";
    const list = element("ol", pictures ? "pictures" : "texts");
    list.append(...group.items.map((item) => drawn(item, pictures)));
    at("found").append(element("h2", "", group.title), list);
    count += group.items.length;
  }
  return count;
}

function say(text) {
  at("status").textContent = text;
}

async function ask(query, type, body, name) {
  if (current) current.abort();
  const mine = (current = new AbortController());
  say("Searching…");
  try {
    const sent = { method: "POST", headers: { "Content-Type": type }, body, signal: mine.signal };
    const answer = await fetch("/search" + query, sent);
    const found = await answer.json();
    if (mine !== current) return;
    if (!answer.ok) {
      show([]);
      say(found.error);
      return;
    }
    const count = show(found.groups);
    const results = count === 1 ? "1 result" : count + " results";
    say(count ? results + " for " + name : "Nothing found for " + name + ".");
  } catch (error) {
    if (mine !== current || error.name === "AbortError") return;
    show([]);
    say("No answer: is `contratile serve` still running?");
  }
}

function stop(text) {
  if (current) current.abort();
  current = last = null;
  show([]);
  say(text);
}

function askedPicture(file) {
  URL.revokeObjectURL(preview);
  preview = file ? URL.createObjectURL(file) : "";
  at("asked").hidden = !file;
  if (file) at("asked").src = preview;
  else at("asked").removeAttribute("src");
}

function searchText() {
  const text = at("text").value.trim();
  askedPicture(null);
  at("picture").value = "";
  if (!text) {
    stop("Type what to search for" + (takes.pictures ? ", or choose a picture." : "."));
    return;
  }
  const asked = { text, split: at("split").value };
  if (!at("among-field").hidden) asked.among = at("among").value;
  last = searchText;
  ask("", "application/json", JSON.stringify(asked), "“" + text + "”");
}

function searchPicture(file) {
  askedPicture(null);
  if (!takes.pictures) return stop("This run has no image encoder: type a text.");
  if (file.size === 0) return stop("This file is empty.");
  if (file.size > limit) return stop("This file is too large: at most " + Math.floor(limit / 2 ** 20) + " MiB.");
  askedPicture(file);
  at("text").value = "";
  last = () => searchPicture(file);
  const query = "?split=" + encodeURIComponent(at("split").value);
  ask(query, "application/octet-stream", file, "the picture " + (file.name || "")); // whatever it is, the server decides
}

at("asked").addEventListener("load", enlarge);
at("text-field").hidden = at("go").hidden = !takes.text;
at("picture-field").hidden = !takes.pictures;
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  searchText();
});
at("picture").addEventListener("change", () => {
  if (at("picture").files.length) searchPicture(at("picture").files[0]);
});
for (const id of ["among", "split"]) at(id).addEventListener("change", () => last && last());

const carriesFile = (event) => event.dataTransfer && Array.from(event.dataTransfer.types).includes("Files");
document.addEventListener("dragover", (event) => {
  if (!carriesFile(event)) return;
  event.preventDefault();
  document.body.classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  if (!carriesFile(event)) return;
  event.preventDefault(); // or the browser would open the file
  document.body.classList.remove("over");
  if (event.dataTransfer.files.length) searchPicture(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData && event.clipboardData.files.length) {
    event.preventDefault();
    searchPicture(event.clipboardData.files[0]);
  }
});
(takes.text ? at("text") : at("picture")).focus();

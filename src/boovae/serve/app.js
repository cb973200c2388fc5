// The page of `boovae serve`. The server keeps no state of it: every request is complete in itself.

const FRAMES = 61, FILM = 9, BATCH = 36, SHOWN_TASKS = 5;
const $ = (id) => document.getElementById(id);
const state = { model: null, images: [], ends: { a: null, b: null }, next: "a", frames: [], own: null, batches: 1 };
const latest = {}; // the newest request of each kind: responses to older ones are dropped

// --- asking the server --------------------------------------------------------------------------------------------

async function ask(kind, address, options = {}) {
  const turn = (latest[kind] = (latest[kind] ?? 0) + 1);
  try {
    const answer = await fetch(address, options);
    const content = await answer.json();
    if (turn !== latest[kind]) return null;
    if (!answer.ok) throw new Error(content.error);
    say("");
    return content;
  } catch (error) {
    if (turn === latest[kind]) say(error instanceof TypeError ? "The server does not respond. Is it still running?" : error.message);
    return null;
  }
}

const post = (kind, content) => ask(kind, `/api/${kind}`, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content),
});

function say(text) { $("status").textContent = text; }

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const nameOf = (task) => state.model.tasks[task].name;
const colourOf = (task) => `hsl(${(task * 137.5 + 205) % 360} 45% 42%)`;
const number = (value, digits = 1) => (value === null ? "not a number" : value.toFixed(digits).replace("-", "−"));

// --- samples --------------------------------------------------------------------------------------------------------

const chosen = (name) => {
  const value = document.querySelector(`input[name=${name}]:checked`)?.value ?? "";
  return value === "" ? null : Number(value);
};

const seed = () => Math.min(Math.max(Math.trunc(Number($("seed").value)) || 0, 0), 999999);

async function sample({ more = false } = {}) {
  const batch = more ? state.batches : 0;
  // Each further batch of a seed has its own seed, far from those that can be typed.
  const request = { n: BATCH, seed: seed() + batch * 1000000, task: chosen("task"), component: chosen("component") };
  const answer = await post("sample", request);
  if (!answer) return;
  state.batches = batch + 1;
  if (!more) { state.images = []; $("grid").replaceChildren(); }
  for (const image of answer.images) addTile(image);
  mark();
}

function addTile(image) {
  const text = image.task === null ? "sample" : `sample of ${nameOf(image.task)}`;
  const tile = make("button", { type: "button", className: "tile", title: image.task === null ? "" : nameOf(image.task) },
    make("img", { src: image.image, alt: text }));
  tile.addEventListener("click", () => choose(image));
  tile.addEventListener("keydown", (event) => {
    if (event.key === "a" || event.key === "b") choose(image, event.key);
  });
  state.images.push({ image, tile });
  $("grid").append(tile);
}

function radio(name, value, checked, ...content) {
  return make("label", {}, make("input", { type: "radio", name, value, checked }), make("span", {}, ...content));
}

async function pickTask() {
  const task = chosen("task");
  $("components").hidden = true;
  $("components").querySelector(".chips").replaceChildren();
  const drawn = sample();
  if (task === null || !state.model.components) return drawn;
  const answer = await ask("components", `/api/components/${task}`);
  if (!answer || chosen("task") !== task) return drawn;
  const all = radio("component", "", true, "all");
  all.querySelector("span").className = "word";
  $("components").querySelector(".chips").replaceChildren(all, ...answer.components.map(componentChip(answer.components)));
  $("components").hidden = false;
  return drawn;
}

function componentChip(all) {
  const most = Math.max(...all.map(({ weight }) => weight));
  return ({ component, weight, image }) => {
    const bar = make("i", { className: "weight" });
    bar.style.width = `${(100 * weight) / most}%`;
    const chip = radio("component", component, false, make("img", { src: image, alt: `component ${component}` }), bar);
    chip.title = `component ${component}: ${(100 * weight).toFixed(1)} % of the task`;
    return chip;
  };
}

// --- on the way ---------------------------------------------------------------------------------------------------

function choose(image, end = state.next) {
  state.ends[end] = image;
  state.next = end === "a" ? "b" : "a";
  travel();
}

function mark() {
  for (const { image, tile } of state.images) {
    const end = ["a", "b"].find((key) => state.ends[key] === image);
    tile.classList.toggle("a", end === "a");
    tile.classList.toggle("b", end === "b");
    tile.querySelector("i")?.remove();
    if (end) tile.append(make("i", {}, end.toUpperCase()));
  }
}

async function travel() {
  mark();
  const { a, b } = state.ends;
  if (!a || !b) return;
  const place = ({ z, task }) => ({ z, task });
  const answer = await post("path", { start: place(a), end: place(b), frames: FRAMES });
  if (!answer) return;
  state.frames = answer.images;
  Object.assign($("start"), { src: a.image, alt: "A" });
  Object.assign($("end"), { src: b.image, alt: "B" });
  $("slider").max = state.frames.length - 1;
  const step = (state.frames.length - 1) / (FILM - 1);
  $("film").replaceChildren(...Array.from({ length: FILM }, (_, i) => {
    const frame = Math.round(i * step), image = make("img", { src: state.frames[frame].image, alt: "" });
    image.addEventListener("click", () => move(frame));
    return image;
  }));
  $("band").replaceChildren(...stretches(state.frames.map((frame) => frame.task)).map(([task, length]) => {
    const part = make("span", { title: nameOf(task) }, nameOf(task));
    part.style.flexGrow = length;
    part.style.flexBasis = 0;
    part.style.background = colourOf(task);
    return part;
  }));
  move(Number($("slider").value));
}

// Runs of equal tasks along the way, as [task, length].
function stretches(tasks) {
  const found = [];
  for (const task of tasks) {
    if (task === null) continue;
    if (found.at(-1)?.[0] === task) found.at(-1)[1] += 1;
    else found.push([task, 1]);
  }
  return found;
}

function move(frame) {
  const last = state.frames.length - 1;
  const here = state.frames[Math.min(Math.max(frame, 0), last)];
  if (!here) return;
  const share = `${Math.round((100 * frame) / last)} %`;
  const text = here.task === null || state.model.networks ? share : `${share} · ${nameOf(here.task)}`;
  Object.assign($("here"), { src: here.image, alt: `the image at ${text}` });
  $("where").textContent = text;
  $("slider").value = frame;
  $("slider").setAttribute("aria-valuetext", text);
}

const player = { on: false, forward: true, place: 0, before: 0 };

function play(on) {
  player.on = on;
  $("play").setAttribute("aria-pressed", on);
  $("play").textContent = on ? "Stop" : "Play";
  if (!on) return;
  player.place = Number($("slider").value);
  player.before = performance.now();
  requestAnimationFrame(advance);
}

function advance(now) {
  if (!player.on) return;
  const last = state.frames.length - 1;
  player.place += ((player.forward ? 1 : -1) * (now - player.before) * last) / 2400;
  player.before = now;
  if (player.place >= last || player.place <= 0) player.forward = player.place <= 0;
  player.place = Math.min(Math.max(player.place, 0), last);
  move(Math.round(player.place));
  requestAnimationFrame(advance);
}

// --- an own image ---------------------------------------------------------------------------------------------------

async function look(file) {
  if (!file) return;
  state.own = file;
  if (file.size > state.model.limits.bytes) {
    say(`That file has ${(file.size / 2 ** 20).toFixed(1)} MB; at most ${state.model.limits.bytes / 2 ** 20} MB are allowed.`);
    return;
  }
  $("verdict").classList.add("waiting");
  const headers = { "Content-Type": file.type.startsWith("image/") ? file.type : "application/octet-stream" };
  const answer = await ask("look", `/api/look?invert=${$("invert").checked}`, { method: "POST", headers, body: file });
  $("verdict").classList.remove("waiting");
  if (answer) showVerdict(answer);
}

function showVerdict(answer) {
  $("verdict").hidden = false;
  $("seen").src = answer.seen;
  $("reconstruction").src = answer.reconstruction.image;
  const { tasks } = answer, best = answer.reconstruction.task;
  $("judgement").replaceChildren();
  if (best !== null) $("judgement").append("It is most like ", make("b", {}, nameOf(best)), `: ${percent(tasks[best].share)}.`);
  const order = tasks.map((_, task) => task).sort((one, other) => tasks[other].share - tasks[one].share);
  $("bars").replaceChildren(...order.slice(0, SHOWN_TASKS).map((task) => make("li", {},
    make("b", { title: nameOf(task) }, nameOf(task)),
    make("meter", { min: 0, max: 1, value: tasks[task].share ?? 0 }),
    make("em", {}, percent(tasks[task].share)))));
  $("score").textContent = scoreText(answer, best);
  for (const end of ["a", "b"]) $(`as-${end}`).onclick = () => choose(answer.reconstruction, end);
}

const percent = (share) => (share === null ? "?" : share > 0.9995 ? "> 99.9 %" : `${(100 * share).toFixed(1)} %`);

function scoreText({ log_likelihood, effective_samples, tasks }, best) {
  const parts = [`log p(x) = ${number(log_likelihood)} nats.`];
  const typical = best === null ? mean(state.model.tasks.map((task) => task.typical)) : state.model.tasks[best].typical;
  if (best !== null) parts.push(`Within ${nameOf(best)}: ${number(tasks[best].log_likelihood)}` + (typical === null ? "." : `; its test images have ${number(typical)} on average.`));
  else if (typical !== null) parts.push(`Test images have ${number(typical)} on average.`);
  if (best === null) parts.push("This method has one prior for all tasks, so it cannot assign the image to one.");
  if (effective_samples !== null && effective_samples < 10) parts.push("The encoder describes this image poorly: the number is imprecise and too low.");
  return parts.join(" ");
}

const mean = (values) => (values.length === 0 || values.includes(null) ? null : values.reduce((sum, value) => sum + value) / values.length);

function preparePad() {
  const [height, width] = state.model.shape.slice(-2), pad = $("pad");
  const draws = state.model.shape.length === 2; // grey values
  pad.hidden = !draws;
  $("clear").hidden = !draws;
  $("zone-how").textContent = `${draws ? "Draw here, or drop" : "Drop"} or paste a picture. It is cropped and resized to ${width} × ${height}.`;
  if (!draws) return;
  const scale = Math.max(1, Math.floor(336 / Math.max(height, width)));
  pad.width = width * scale;
  pad.height = height * scale;
  const pen = pad.getContext("2d");
  Object.assign(pen, { strokeStyle: "#fff", lineCap: "round", lineJoin: "round", lineWidth: Math.max(0.075 * pad.width, 1.15 * scale) });
  const at = (event) => [(event.offsetX * pad.width) / pad.clientWidth, (event.offsetY * pad.height) / pad.clientHeight];
  const wipe = () => { pen.fillStyle = "#000"; pen.fillRect(0, 0, pad.width, pad.height); };
  wipe();
  pad.addEventListener("pointerdown", (event) => {
    pad.setPointerCapture(event.pointerId);
    pen.beginPath();
    pen.moveTo(...at(event));
    pen.lineTo(...at(event));
    pen.stroke();
  });
  pad.addEventListener("pointermove", (event) => {
    if (!pad.hasPointerCapture(event.pointerId)) return;
    pen.lineTo(...at(event));
    pen.stroke();
  });
  pad.addEventListener("pointerup", () => {
    $("invert").checked = false;
    pad.toBlob(look, "image/png");
  });
  $("clear").addEventListener("click", () => { wipe(); $("verdict").hidden = true; state.own = null; });
}

// --- beginning ------------------------------------------------------------------------------------------------------

function prepare() {
  const { model } = state;
  document.title = `${model.run} · boovae`;
  $("run").textContent = `boovae · ${model.run}`;
  $("title").textContent = `${model.method} on ${model.dataset}`;
  const size = model.shape.length === 1 ? `${model.shape[0]} features` : `${model.shape.slice(-2).reverse().join(" × ")} pixels`;
  $("facts").textContent = `${model.tasks.length} task${model.tasks.length > 1 ? "s" : ""} learned · ${size} · ${model.latent_dim} latent dimensions`;
  document.body.classList.toggle("strips", model.shape.length === 1);
  const [height, width] = model.shape.slice(-2);
  $("smooth").checked = model.shape.length === 3 || Math.max(height, width) < 20; // small images are hard to read as squares
  smoothen();
  document.body.style.setProperty("--ratio", `${width} / ${height}`);
  $("tasks").hidden = !model.apart;
  $("own").hidden = !model.pictures;
  $("between-how").hidden = !model.networks;
  $("band").hidden = !model.apart || model.networks; // one network's way has one task
  if (model.apart) {
    const chips = model.tasks.map((task, index) => radio("task", index, false, task.name));
    $("tasks").querySelector(".chips").replaceChildren(radio("task", "", true, "all"), ...chips);
  } else $("samples-how").textContent += " This method has one prior for all tasks.";
  if (model.pictures) preparePad();
  document.querySelector("main").hidden = false;
}

const smoothen = () => document.body.classList.toggle("smooth", $("smooth").checked);

function listen() {
  $("smooth").addEventListener("change", smoothen);
  $("tasks").addEventListener("change", pickTask);
  $("components").addEventListener("change", () => sample());
  $("more").addEventListener("click", () => sample({ more: true }));
  $("reseed").addEventListener("click", () => { $("seed").value = (seed() + 1) % 1000000; sample(); });
  $("seed").addEventListener("change", () => { $("seed").value = seed(); sample(); });
  $("slider").addEventListener("input", () => { play(false); move(Number($("slider").value)); });
  $("play").addEventListener("click", () => play(!player.on));
  $("swap").addEventListener("click", () => {
    state.ends = { a: state.ends.b, b: state.ends.a };
    $("slider").value = $("slider").max - $("slider").value;
    travel();
  });
  $("file").addEventListener("change", () => { look($("file").files[0]); $("file").value = ""; });
  $("invert").addEventListener("change", () => look(state.own));
  document.addEventListener("paste", (event) => look(event.clipboardData.files[0]));
  for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, (event) => { event.preventDefault(); $("zone").classList.add("over"); });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("zone").classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    $("zone").classList.remove("over");
    look(event.dataTransfer.files[0]);
  });
}

state.model = await ask("model", "/api/model");
if (state.model) {
  prepare();
  listen();
  await sample();
  const [first, ...others] = state.images.map(({ image }) => image);
  state.ends = { a: first, b: others.find((image) => image.task !== first.task) ?? others[0] };
  $("slider").value = 0;
  await travel();
  move(Math.round(state.frames.length / 2));
} else $("title").textContent = "Nothing to show";

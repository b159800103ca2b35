"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const escaped = text => String(text).replace(/[&<>"]/g, c => "&#" + c.charCodeAt(0) + ";");
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
function size(bytes, digits = 1) {
  if (bytes < 0) return "−" + size(-bytes, digits);
  let i = 0;
  while (bytes >= 1024 && i < units.length - 1) { bytes /= 1024; ++i; }
  return bytes.toFixed(i ? digits : 0) + " " + units[i];
}
const milliseconds = seconds => seconds ? (seconds * 1e3).toFixed(2) : "";
const short = op => op.replace(/^aten::/, "").replace(/\.default$/, "");
const where = row => row.module || row.region;
const layers = row => row.layers > 1 ? where(row) + " ×" + row.layers : where(row);
const why = row => ["kept", "copied", "escaped"].includes(row.fate) && row.reason || row.rule || row.reason;
const colour = fate => `var(--${fate})`;
const chip = fate => `<span class="chip" style="background:${colour(fate)}" title="${escaped(report.fates[fate])}">${escaped(fate)}</span>`;
const shapeOf = row => `${row.shape.map(n => n < 0 ? "*" : n).join("×") || "scalar"} ${row.dtype}`;
const fileOf = source => source.replace(/^.*[\/\\]/, "");
const stackOf = row => report.stacks[row.stack];
const sourceOf = row => (stackOf(row)[0] || "").replace(/ in [^ ]*$/, "");
const sum = (rows, key) => rows.reduce((all, row) => all + row[key], 0);

// Shortens a text in its middle, since names often differ only at the beginning or the end.
function cut(text, most) {
  const head = Math.ceil((most - 1) / 2);
  return text.length <= most ? text : most < 4 ? "" : text.slice(0, head) + "…" + text.slice(text.length - (most - 1 - head));
}
const cell = (text, most) => `<span title="${escaped(text)}">${escaped(cut(text, most))}</span>`;
const letter = 6.7;  // width of a letter in the pictures, in SVG units
const label = (text, x, y, width, kind) => {
  const shown = cut(text, Math.floor((width - 6) / letter));
  return shown && `<text class="${kind}" x="${x + 4}" y="${y}">${escaped(shown)}</text>`;
};

function tip(event, text) {
  const box = $("tip");
  box.style.display = text ? "block" : "none";
  if (!text) return;
  box.textContent = text;
  box.style.left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8) + "px";
}

const legend = entries => entries.map(([name, colour, title]) =>
  `<span title="${escaped(title || "")}"><i style="background:${colour}"></i>${escaped(name)}</span>`).join("");

// Words for the outcomes in `report.ahead`.
const outcomes = { in_time: "replayed ahead in time", late: "replayed ahead late", in_vain: "replayed ahead unused",
  held: "not freed", stopped: "replayed ahead in part" };

function figures() {
  const { plan } = report, course = plan && plan.measured && plan.measured.peak !== null ? plan.measured : plan && plan.predicted;
  const [peak, eager] = plan ? [course.peak, plan.plain.peak] : [report.peak_held, report.peak_eager];
  const all = [[size(peak), plan ? `peak of the step, ${course === plan.measured ? "measured" : "predicted"}` : "peak saved for backward"],
    [size(eager), plan ? "in eager, predicted" : "in eager"]];
  if (peak) all.push([(eager / peak).toFixed(1) + "×", "less memory"]);
  if (plan && plan.plain.duration) all.push([signed(plan.predicted.duration / plan.plain.duration - 1), "time, predicted"]);
  all.push([sum(report.rows, "replays"), "results recomputed"],
    [milliseconds(sum(report.rows, "replay_seconds")) + " ms", "spent recomputing (host time)"]);
  const ahead = sum(report.rows, "ahead_seconds");
  if (ahead) all.push([milliseconds(ahead) + " ms", "of that, ahead of backward"]);
  for (const [fate, count] of Object.entries(report.ahead))
    if (count) all.push([count, "regions " + outcomes[fate]]);
  $("title").textContent = `ebb: forward and backward ${report.number}` + (plan ? ", under a plan" : "");
  $("headline").textContent = (plan ? "The first figures are those of a whole step under the plan, as in the picture below. " +
    `All else describes forward and backward ${report.number}. ` : "") + "Each storage is counted once. Sizes are storage sizes; times are host times.";
  $("figures").innerHTML = all.map(([value, name]) => `<div><b>${escaped(value)}</b><span>${escaped(name)}</span></div>`).join("");
  const parts = Object.keys(report.fates).map(fate => [fate, sum(report.rows.filter(row => row.fate === fate), "eager")])
    .filter(([, bytes]) => bytes);
  $("sum").innerHTML = parts.map(([fate, bytes]) =>
    `<div style="flex:${bytes};background:${colour(fate)}" title="${fate} ${size(bytes)}"></div>`).join("");
  $("legend").innerHTML = legend(parts.map(([fate, bytes]) => [`${size(bytes)} ${fate}`, colour(fate), report.fates[fate]])) +
    `<span>= ${size(report.eager)} that eager saves for backward</span>`;
  const saved = sum(report.rows.filter(row => ["saved", "kept", "escaped"].includes(row.fate)), "eager");
  const other = [[saved, "saved for backward (part of the bytes above)"],
    [report.held - saved - report.totals.result, "that only replays need"],
    [report.totals.result, "of results that the program still references"]];
  $("held").textContent = `When the regions end, ${size(report.held)} are in memory: ` +
    other.filter(([bytes]) => bytes).map(([bytes, what]) => `${size(bytes)} ${what}`).join(", ") + ".";
  $("notes").textContent = report.notes.map(note => note + ".").join(" ");
}

const frame = { left: 78, right: 1126, top: 24, bottom: 226 };

// Distance between ticks of an axis: 1, 2 or 5 times a power of ten.
function round(most, count) {
  const raw = most / count, power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find(factor => factor * power >= raw * .999);
}
function ticks(least, most, step) {
  const found = [];
  for (let i = Math.ceil(least / step); i * step <= most * 1.001; ++i) found.push(i * step);
  return found;
}
function byteTicks(least, most) {
  const unit = 1024 ** Math.max(0, Math.min(units.length - 1, Math.floor(Math.log2(most) / 10)));
  return ticks(least, most, Math.max(1, round(most / unit, 5) * unit));
}
const bytes = value => size(Math.round(value)).replace(".0 ", " ");
const time = value => `${+value.toPrecision(6)} ms`;

// Grid lines and their labels: vertical lines at `xs`, labelled by `along`; horizontal ones at `ys`, labelled by `up`.
function grid(x, xs, along, y, ys, up, below = 22) {
  const { left, right, top, bottom } = frame;
  return ys.map(value => `<line x1="${left}" x2="${right}" y1="${y(value)}" y2="${y(value)}" stroke="var(--line)"/>` +
    `<text x="${left - 8}" y="${y(value) + 4}" text-anchor="end">${up(value)}</text>`).join("") +
    xs.map(value => `<line x1="${x(value)}" x2="${x(value)}" y1="${bottom}" y2="${bottom + below - 16}" stroke="var(--line)"/>` +
    `<text x="${x(value)}" y="${bottom + below}" text-anchor="middle">${along(value)}</text>`).join("");
}
const scale = (least, most, from, to) => value => from + (to - from) * (value - least) / (most - least || 1);

// A path of horizontal steps. Each point has a time, and the level from that time on.
function levels(points, place, x, y) {
  let level = y(0), path = `M${x(0)},${level}`;
  for (const point of points) {
    path += `L${x(point[0]).toFixed(1)},${level}`;
    level = y(point[place]).toFixed(1);
    path += `L${x(point[0]).toFixed(1)},${level}`;
  }
  return path;
}
function levelAt(points, time, place) {
  let found = 0;
  for (const point of points) { if (point[0] > time) break; found = point[place]; }
  return found;
}

// A vertical line that follows the mouse, with a tooltip: `words` describes the time at the line.
function follow(svg, end, words) {
  const { left, right, top, bottom } = frame;
  svg.innerHTML += `<line y1="${top}" y2="${bottom}" stroke="var(--soft)" visibility="hidden"/>`;
  const line = svg.lastElementChild;
  const hide = () => { tip(); line.setAttribute("visibility", "hidden"); };
  svg.onmousemove = event => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * 1140;
    if (place < left || place > right) return hide();
    line.setAttribute("x1", place); line.setAttribute("x2", place);
    line.setAttribute("visibility", "visible");
    tip(event, words((place - left) / (right - left) * end));
  };
  svg.onmouseleave = hide;
}

const orange = "var(--kept)";
const courses = [["eager, predicted", "plain", "var(--plain)"], ["predicted", "predicted", "var(--saved)"],
  ["measured", "measured", "var(--recomputed)"]];

// Under a plan, shows the bytes that a step allocates, predicted and measured, with the regions of the measured or
// else the predicted step. Without a plan, shows the bytes saved for backward.
function memory() {
  const { plan } = report;
  const begins = Math.min(...[...report.spans.map(span => span[2]), ...report.timeline.map(point => point[0])]) * 1e3;
  const shown = plan && (plan.measured && plan.measured.spans.length ? plan.measured : plan.predicted);
  const spans = plan ? shown.spans : report.spans.map(([kind, name, start, seconds]) => [kind, name, start * 1e3 - begins, seconds * 1e3]);
  const points = report.timeline.map(([seconds, held, eager]) => [seconds * 1e3 - begins, held, eager]);
  const lasts = points.length ? points[points.length - 1][0] : 0;
  const lines = plan ? courses.filter(([, key]) => plan[key] && plan[key].timeline.length)
      .map(([name, key, colour]) => ({ name, key, colour, points: plan[key].timeline, place: 1 })) :
    [{ name: "in eager", key: "eager", colour: "var(--plain)", points, place: 2 },
      { name: "with ebb", key: "ebb", colour: "var(--saved)", points, place: 1 }];
  const end = plan ? Math.max(...courses.map(([, key]) => plan[key] ? plan[key].duration || 0 : 0)) : lasts;
  if (!end) return;
  const all = lines.flatMap(line => line.points.map(point => point[line.place]));
  const budget = plan && plan.budget >= 0 ? plan.budget : null;
  const [least, most] = [Math.min(0, ...all), Math.max(budget || 1, ...all)];
  const x = scale(0, end, frame.left, frame.right), y = scale(least, most, frame.bottom, frame.top);
  const isWhole = !plan || plan.passes === 1;  // else forwards and backwards alternate
  $("memory").innerHTML = (isWhole ? phases(spans, plan ? shown.duration : 0, x) : "") +
    grid(x, ticks(0, end, round(end, 7)), time, y, byteTicks(least, most), bytes, 46) +
    lines.map(({ key, colour, points, place }) => {
      const isArea = !plan || key === "plain";
      return `<path data-line="${key}" d="${levels(points, place, x, y)}${isArea ? `L${x(end)},${y(0)}Z` : ""}" stroke="${colour}" ` +
        `stroke-width="1.5" fill="${isArea ? colour : "none"}" fill-opacity="${key === "ebb" ? .45 : .22}"/>`;
    }).join("") + (budget === null ? "" : `<line data-line="budget" x1="${frame.left}" x2="${frame.right}" y1="${y(budget)}" ` +
      `y2="${y(budget)}" stroke="${orange}" stroke-dasharray="6 4"/>`);
  $("memory-legend").innerHTML = legend([...lines.map(line => [line.name, line.colour]),
    ...(budget === null ? [] : [[`budget, ${size(budget)}`, orange]])]);
  $("memory-note").textContent = plan ? "All memory that a step under the plan allocates above that in use when it begins, with gradients and what the " +
    `optimizer allocates. The strip below shows the regions of the ${shown === plan.measured ? "measured" : "predicted"} step.` +
    (isWhole ? "" : ` The step has ${plan.passes} forwards and backwards. This picture and the plan show the whole step; all else on this page shows the last forward and backward.`) :
    "Memory saved for backward, with ebb and in eager, without parameters, gradients and the optimizer's. The strip below shows when each region runs forward and backward.";
  follow($("memory"), end, at => `${at.toFixed(2)} ms\n` + lines.map(line =>
    `${line.name}: ${size(levelAt(line.points, at, line.place))}`).join("\n"));
}

// Forward and backward as bands, and below them the outermost regions. Times are milliseconds. `end`: of a step with its
// optimizer, or 0.
function phases(all, end, x) {
  const { top, bottom } = frame;
  const found = kind => all.filter(span => span[0] === kind).map(([, name, from, took]) => ({ name, from, to: from + took }))
    .sort((a, b) => a.from - b.from || b.to - a.to);
  let until = -1;
  const forward = found("region").filter(span => span.to > until && ((until = span.to), true));
  const names = new Set(forward.map(span => span.name));
  const backward = found("backward").filter(span => names.has(span.name));
  backward.forEach((span, i) => { span.to = i + 1 < backward.length ? backward[i + 1].from : span.to; });
  const ends = Math.max(0, ...backward.map(span => span.to));
  const rest = ends && end > ends && frame.right > x(ends) + 70 ? `<text class="strong" x="${x(ends) + 4}" y="${top - 8}">optimizer</text>` +
    `<line x1="${x(ends)}" x2="${x(ends)}" y1="${top - 18}" y2="${bottom}" stroke="var(--line)"/>` : "";
  return rest + [["forward", forward], ["backward", backward]].map(([phase, spans]) => {
    if (!spans.length) return "";
    const from = x(spans[0].from), to = x(Math.max(...spans.map(span => span.to)));
    return `<rect x="${from}" y="${top}" width="${Math.max(0, to - from)}" height="${bottom - top}" fill="var(--band)" opacity="${phase === "forward" ? .55 : 1}"/>` +
      label(phase, from - 4, top - 8, to - from, "strong") + spans.map((span, i) => {
        const [left, width] = [x(span.from), Math.max(.5, x(span.to) - x(span.from))];
        return `<g><title>${escaped(span.name)}, ${phase}</title><rect x="${left}" y="${bottom + 2}" width="${width}" height="20" ` +
          `fill="${colour(phase === "forward" ? "saved" : "recomputed")}" opacity="${i % 2 ? .55 : .85}"/>` +
          label(span.name, left, bottom + 16, width, "name") + "</g>";
      }).join("");
  }).join("");
}

function advice() {
  $("advice").hidden = !report.advice.length;
  $("advice-rows").innerHTML = report.advice.map((one, i) => `<tr data-advice="${i}"${i ? "" : ' class="chosen"'}><td class="number">${milliseconds(one.seconds)} ms</td>` +
    `<td class="number">${size(one.bytes)}</td><td>${cell(short(one.op), 34)}</td><td>${cell(one.where, 28)}</td>` +
    `<td class="number">${one.layers}</td><td>${cell(fileOf(one.source), 26)}</td></tr>`).join("");
  const toCopy = text => `<div class="copy"><button type="button">copy</button><pre>${escaped(text)}</pre></div>`;
  const show = one => {
    $("advice-how").innerHTML = `<b>save ${escaped(short(one.op))} in ${escaped(one.where)}</b><p>In Python, the first rule of the policy:</p>${toCopy(one.rule)}` +
      (one.variable ? `<p>Or without a change of the program, set:</p>${toCopy(one.variable)}` : "") +
      (one.file ? `<p>and save as policy.toml:</p>${toCopy(one.file)}` : "");
  };
  $("advice-rows").onclick = event => {
    const line = event.target.closest("tr");
    pick($("advice-rows"), line);
    show(report.advice[line.dataset.advice]);
  };
  $("advice-how").onclick = event => {
    const text = event.target.tagName === "BUTTON" && event.target.nextElementSibling;
    if (!text) return;
    getSelection().selectAllChildren(text);  // navigator.clipboard is missing in pages without https
    if (document.execCommand("copy")) event.target.textContent = "copied";
  };
  if (report.advice.length) show(report.advice[0]);
}

// Marks the chosen row of a table.
function pick(body, line) {
  for (const other of body.querySelectorAll(".chosen")) other.className = "";
  line.className = "chosen";
}

const signed = share => `${share < 0 ? "−" : "+"}${Math.abs(share * 100).toFixed(1)} %`;
const percent = share => `${(share * 100).toFixed(1)} %`;
const budgetInWords = ({ budget }) => budget < 0 ? `${size(-budget)} below` : `${size(budget)} above`;

function planFigures(plan) {
  const figure = (value, show, deviation) => value === null ? "–" : show(value) + (deviation === null ? "" : ` (${signed(deviation)})`);
  const none = { peak: null, duration: null };
  const row = (name, { peak, duration }, more) => `<tr><td>${name}</td>` +
    `<td class="number">${figure(peak, size, more.peak)}</td>` +
    `<td class="number">${figure(plan.budget > 0 ? peak && peak / plan.budget : null, percent, null)}</td>` +
    `<td class="number">${figure(duration, milliseconds => milliseconds.toFixed(2) + " ms", more.duration)}</td>` +
    `<td class="number">${figure(duration && duration / plan.plain.duration, percent, null)}</td></tr>`;
  $("plan-figures").innerHTML = row("predicted", plan.predicted, none) +
    row("measured", plan.measured || none, plan.deviation) + row("eager", plan.plain, none);
  $("plan-note").textContent = `Budget: ${budgetInWords(plan)} the memory in use when the step begins. ` +
    "It covers everything that the step allocates, inside and outside of regions." +
    (!plan.measured ? " No step was measured under this plan." : plan.measured.peak === null ?
      " Bytes are not measured while replay ahead is on." : "");
}

const added = (plan, point) => point.duration - plan.plain.duration;
const inWords = (plan, point) => `${size(point.budget)}: peak ${size(point.peak)}, ` +
  `${added(plan, point).toFixed(2)} ms added (${signed(added(plan, point) / plan.plain.duration)})` +
  (point.is_plan ? ", the plan" : "");

function planCurve(plan) {
  const order = [...plan.points].sort((a, b) => a.peak - b.peak || b.duration - a.duration);
  const peaks = order.map(point => point.peak), end = Math.max(plan.budget, plan.plain.peak, ...peaks);
  const share = point => added(plan, point) / plan.plain.duration;
  // The axis of added times is logarithmic; its lowest line stands for all smaller values.
  const most = Math.max(1e-3, ...order.map(share)), least = Math.min(most / 10, Math.max(1e-4, ...order.map(share).filter(s => s > 0).slice(-1)));
  const up = scale(Math.log10(least), Math.log10(most), frame.bottom, frame.top);
  const x = scale(0, end, frame.left, frame.right), y = value => up(Math.log10(Math.max(value, least)));
  const powers = ticks(Math.floor(Math.log10(least)), Math.log10(most), 1).map(power => 10 ** power);
  const lines = [1, 2, 5].flatMap(factor => powers.map(power => factor * power)).filter(value => value > least * 1.5 && value <= most);
  const place = point => [x(point.peak).toFixed(1), y(share(point)).toFixed(1)];
  const path = order.map((point, i) => i ? `H${place(point)[0]}V${place(point)[1]}` : `M${place(point)}`).join("");
  $("plan-curve").innerHTML = grid(x, byteTicks(0, end), bytes, y, [least, ...lines],
    value => (value === least ? "≤" : "+") + `${+(value * 100).toPrecision(2)} %`) +
    `<path d="${path}" stroke="var(--saved)" stroke-width="1.5" fill="none"/>` +
    (plan.budget < 0 ? "" : `<line data-line="budget" x1="${x(plan.budget)}" x2="${x(plan.budget)}" y1="${frame.top}" y2="${frame.bottom}" stroke="${orange}" stroke-dasharray="6 4"/>`) +
    order.map(point => `<circle class="point" data-point="${plan.points.indexOf(point)}" cx="${place(point)[0]}" cy="${place(point)[1]}" ` +
      `r="${point.is_plan ? 7 : 5}" fill="${point.is_plan ? orange : "var(--saved)"}"/>`).join("");
  $("plan-budget").innerHTML = plan.points.map((point, i) =>
    `<option value="${i}"${point.is_plan ? " selected" : ""}>${inWords(plan, point)}</option>`).join("");
  const pointAt = event => plan.points[event.target.dataset.point];
  $("plan-curve").onmousemove = event => tip(event, pointAt(event) && inWords(plan, pointAt(event)));
  $("plan-curve").onmouseleave = () => tip();
  $("plan-curve").onclick = event => {
    if (!pointAt(event)) return;
    $("plan-budget").value = event.target.dataset.point;
    planCuts(plan, pointAt(event));
  };
  $("plan-budget").onchange = () => planCuts(plan, plan.points[$("plan-budget").value]);
  planCuts(plan, plan.points.find(point => point.is_plan));
}

function planCuts(plan, shown) {
  const each = (found, words) => Object.entries(found).map(([op, what]) => `${escaped(op)} ${words(what)}`).join(", ");
  $("plan-cuts").innerHTML = shown.cuts.map(cut => `<tr><td class="wide names">${escaped(cut.modules)}</td><td class="number">${escaped(cut.count)}</td>` +
    `<td class="number">${size(cut.held)}</td><td class="number">${cut.added.toFixed(2)} ms</td>` +
    `<td class="wide">${cut.is_region ? each(cut.kept, size) || "nothing" : "everything (left eager)"}</td>` +
    `<td class="wide">${each(cut.away, size) || "nothing"}</td>` +
    `<td class="wide">${Object.entries(cut.again).map(([op, what]) => `${escaped(op)} (${what.bytes ? size(what.bytes) + " freed, " : ""}` +
      `${what.duration.toFixed(2)} ms${cut.often[op] ? `, ${escaped(cut.often[op])} times` : ""})`).join(", ") || "nothing"}</td></tr>`).join("");
  for (const circle of $("plan-curve").querySelectorAll(".point"))
    circle.setAttribute("stroke", plan.points[circle.dataset.point] === shown ? "var(--ink)" : "none");
}

function plan() {
  if (!report.plan) return;
  $("plan").hidden = false;
  planFigures(report.plan);
  $("plan-budgets").hidden = !report.plan.points.length;
  if (report.plan.points.length) planCurve(report.plan);
}

// Squarified treemap. Source: Bruls, Huizing, van Wijk, "Squarified Treemaps", 2000.
function squares(items, x, y, w, h, place) {
  const scale = w * h / sum(items, "bytes");
  let i = 0;
  while (i < items.length && w > 0 && h > 0) {
    const side = Math.min(w, h), first = i;
    let area = 0, worst = Infinity;
    for (; i < items.length; ++i) {
      const next = area + items[i].bytes * scale;
      const ratio = Math.max(side * side * items[first].bytes * scale / (next * next), next * next / (side * side * items[i].bytes * scale));
      if (ratio > worst) break;
      worst = ratio; area = next;
    }
    const thick = area / side;
    let along = 0;
    for (const item of items.slice(first, i)) {
      const length = item.bytes * scale / thick;
      if (w >= h) place(item, x, y + along, thick, length);
      else place(item, x + along, y, length, thick);
      along += length;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
  }
}

function tree() {
  const modules = new Map();
  for (const row of report.collapsed) {
    if (!row.bytes || ["outside", "result", "unneeded"].includes(row.fate)) continue;
    const found = modules.get(layers(row)) || { name: layers(row), bytes: 0, rows: [] };
    found.bytes += row.bytes; found.rows.push(row); modules.set(found.name, found);
  }
  const bySize = (a, b) => b.bytes - a.bytes;
  let svg = "";
  const tiles = [];
  squares([...modules.values()].sort(bySize), 0, 0, 860, 420, (module, x, y, w, h) => {
    const header = h > 34 && w > 60 ? 16 : 0;
    if (header) svg += label(`${module.name} ${size(module.bytes)}`, x, y + 12, w, "strong");
    squares(module.rows.sort(bySize), x + 1, y + header, w - 2, h - header - 1, (row, rx, ry, rw, rh) => {
      svg += `<rect class="tile" data-tile="${tiles.length}" x="${rx.toFixed(1)}" y="${ry.toFixed(1)}" width="${rw.toFixed(1)}" height="${rh.toFixed(1)}" fill="${colour(row.fate)}"/>` +
        (rh > 15 ? label(short(row.op), rx, ry + 13, rw, "name") : "") + (rh > 30 && rw > 70 ? label(size(row.bytes), rx, ry + 26, rw, "name") : "");
      tiles.push(row);
    });
  });
  $("tree").innerHTML = svg || `<text x="16" y="28">nothing is saved or recomputed</text>`;
  const rowAt = event => tiles[event.target.dataset.tile];
  $("tree").onmousemove = event => {
    const row = rowAt(event);
    tip(event, row && `${layers(row)}\n${short(row.op)} ${shapeOf(row)}\n${size(row.bytes)}, ${row.fate}\n${fileOf(sourceOf(row))}`);
  };
  $("tree").onmouseleave = () => tip();
  $("tree").onclick = event => { if (rowAt(event)) choose(rowAt(event)); };
}

// Shows the details of a row, with the Python stack where its storages were made.
function choose(row) {
  const [here, ...callers] = stackOf(row);
  $("chosen").innerHTML = `<b>${escaped(short(row.op))}</b> ${chip(row.fate)}<br>` +
    `${escaped(layers(row))}<br>${size(row.bytes)}${row.count > 1 ? ` in ${row.count} storages` : ""}, ${escaped(shapeOf(row))}<br>` +
    (row.replays ? `recomputed in ${milliseconds(row.replay_seconds)} ms<br>` : "") + `<span style="color:var(--soft)">${escaped(why(row))}</span>` +
    (here ? `<pre class="here">${escaped(here)}</pre><pre style="color:var(--soft)">${callers.map(escaped).join("\n")}</pre>` : "");
}

const columns = [
  ["bytes", row => row.bytes, row => size(row.bytes), "number"],
  ["count", row => row.count, row => row.count, "number"],
  ["fate", row => row.fate, row => chip(row.fate)],
  ["operator", row => row.op, row => `<code>${cell(short(row.op), 30)}</code>`],
  ["shape", shapeOf, row => cell(shapeOf(row), 26)],
  ["module or region", where, row => cell(layers(row), 30)],
  ["line", sourceOf, row => cell(fileOf(sourceOf(row)), 24)],
  ["replays", row => row.replays, row => row.replays || "", "number"],
  ["replay ms", row => row.replay_seconds, row => milliseconds(row.replay_seconds), "number"],
  ["rule or reason", why, row => escaped(why(row)), "wide"]];
const words = new Map();  // for each row, the text in which the filter searches
const wordsOf = row => words.get(row) || words.set(row, [row.op, layers(row), row.region, row.fate,
  shapeOf(row), sourceOf(row), row.rule, row.reason].join(" ").toLowerCase()).get(row);
let sortBy = 0, descending = true, found = [], written = 0;

function table() {
  const asked = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  found = ($("apart").checked ? report.rows : report.collapsed).filter(row =>
    ($("outside").checked || row.fate !== "outside") && asked.every(word => wordsOf(row).includes(word)));
  const key = columns[sortBy][1];
  found.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (descending ? -1 : 1));
  $("head").innerHTML = columns.map(([name, , , kind], i) =>
    `<th class="${kind || ""}" data-column="${i}"${i === sortBy ? ` aria-sort="${descending ? "descending" : "ascending"}"` : ""}>${name}</th>`).join("");
  $("body").innerHTML = "";
  $("scroll").scrollTop = written = 0;
  more();
  $("shown").textContent = `${found.length} rows, ${size(sum(found, "bytes"))}`;
}

// Adds the next 100 rows to the table. Called again when the user scrolls down.
function more() {
  const next = found.slice(written, written + 100);
  $("body").insertAdjacentHTML("beforeend", next.map((row, i) => `<tr data-row="${written + i}">` + columns.map(([, , show, kind]) =>
    `<td class="${kind || ""}">${show(row)}</td>`).join("") + "</tr>").join(""));
  written += next.length;
}

$("scroll").onscroll = () => {
  const { scrollTop, clientHeight, scrollHeight } = $("scroll");
  if (written < found.length && scrollTop + 2 * clientHeight > scrollHeight) more();
};
$("head").onclick = event => {
  const column = +event.target.dataset.column;
  descending = column === sortBy ? !descending : true;
  sortBy = column;
  table();
};
$("body").onclick = event => {
  const line = event.target.closest("tr");
  pick($("body"), line);
  choose(found[line.dataset.row]);
};
for (const id of ["search", "apart", "outside"]) $(id).oninput = table;
$("idle").hidden = !report.idle_rules.length;
$("idle-count").textContent = `${report.idle_rules.length} rules without effect here`;
$("idle-rules").textContent = report.idle_rules.join("\n");
figures(); memory(); advice(); plan(); tree(); table();
if (found.length) choose(found[0]);

"use strict";
// The page of a program. `content` is what shardc/page/content.py writes; nothing else is read, and nothing is fetched.
const content = JSON.parse(document.getElementById("content").textContent);
const COLOURS = ["#9ecbff", "#ffd399", "#b4e6b4", "#e3b8f0", "#ffb3b3", "#c9d6df", "#f5e28b", "#a8e6e0"];
const axes = Object.keys(content.mesh);
const PHASES = { fwd: "forward", bwd: "backward", opt: "update" };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(count) < 1024 || unit === "TiB") return `${+count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
}

// A sub-axis (tp.0) has the colour of its axis.
const colour = (axis) => COLOURS[Math.max(axes.indexOf(axis.split(".")[0]), 0) % COLOURS.length];

// ---------------------------------------------------------------- text with placements as colours and names as links
const TOKEN = /(%"(?:[^"\\]|\\.)*"|%[\w.\-\/:]+)|(@[A-Za-z_][\w.]*)|(\|\w+ [A-Za-z_]\w*)/g;

function rich(text, jump) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(TOKEN)) {
    parts.push(text.slice(last, match.index));
    last = match.index + match[0].length;
    if (match[1]) {
      const name = match[1];
      parts.push(jump ? element("span", { class: "name", onclick: (event) => jump(name, event) }, name) : name);
    } else {
      const axis = match[2] ? match[2].slice(1) : match[3].split(" ")[1];
      const known = axis.split(".").some((part) => axes.includes(part));
      parts.push(known ? element("span", { class: "chip", style: `background: ${colour(axis)}` }, match[0]) : match[0]);
    }
  }
  parts.push(text.slice(last));
  return parts;
}

// ---------------------------------------------------------------- details
function facts(pairs) {
  const list = element("dl");
  for (const [term, value] of pairs) {
    if (value === "" || value === null || value === undefined) continue;
    list.append(element("dt", {}, term), element("dd", {}, ...(Array.isArray(value) ? value : [String(value)])));
  }
  return list;
}

function showDetails(...children) {
  document.getElementById("details").replaceChildren(...children);
}

// A name of a layer that is not shown stands for the same line of the equal layer that is.
function shownName(graph, name) {
  if (graph.values[name]) return name;
  for (const segment of graph.segments) {
    if (segment.count < 2) continue;
    const list = segment.layer.replace(/\d+$/, "").replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const other = name.replace(new RegExp(`(^|[%."])${list}\\d+(?!\\w)`), `$1${segment.layer}`);
    if (graph.values[other]) return other;
  }
  return name;
}

function describe(graph, name, jump) {
  const value = graph.values[name];
  const edge = graph.edges[name];
  const readers = graph.readers.get(name) || [];
  const links = (names) => names.flatMap((other) => [...rich(other, jump), " "]);
  const parts = [element("h2", { class: "code" }, name)];
  if (edge) {
    const often = edge.times > 1 ? `, ${edge.times} times a step` : "";
    parts.push(
      facts([
        ["collective", `${edge.kind} over ${edge.axes.join(".")} (${edge.ranks} ranks)`],
        ["sent by a rank", `${bytes(edge.bytes)}${often}, of a payload of ${bytes(edge.payload)}`],
        ["cause", edge.cause],
      ]),
    );
    for (const reason of edge.why) {
      parts.push(
        element("h2", {}, `Why, over ${reason.axis}`),
        facts([["left", rich(reason.why, jump)], ["needed", rich(reason.needed, jump)], ["cause", reason.cause]]),
      );
    }
    if (edge.number >= 0) {
      parts.push(element("p", { class: "quiet" }, `program.explain(${edge.number}) tries changes that would remove it.`));
    }
    parts.push(element("h2", {}, "Value"));
  }
  parts.push(
    facts([
      ["type", value && [element("span", { class: "code" }, ...rich(value.type))]],
      ["a rank holds", value && `[${value.local.join(", ")}], ${bytes(value.bytes)}`],
      ["line", value && value.source],
      ["", value && value.text && [element("code", {}, value.text)]],
      ["module", value && value.fqn],
      ["phase", value && PHASES[value.phase]],
      ["placed by", value && !edge ? value.cause : ""],
      ["read by", readers.length ? links(readers) : ""],
    ]),
  );
  showDetails(...parts);
}

// ---------------------------------------------------------------- graphs
for (const graph of content.graphs) {
  graph.readers = new Map();
  for (const segment of graph.segments) {
    for (const line of segment.lines) {
      const [left, right] = split(line);
      for (const name of right.match(/%"(?:[^"\\]|\\.)*"|%[\w.\-\/:]+/g) || []) {
        if (!graph.readers.has(name)) graph.readers.set(name, []);
        const list = graph.readers.get(name);
        if (left && list.at(-1) !== left) list.push(left);
      }
    }
  }
}

function split(line) {
  const at = line.indexOf(" = ");
  if (at < 0 || !/^\s*[%_]/.test(line)) return ["", line];
  const named = line.slice(0, at).trim().split(", ").find((name) => name.startsWith("%"));
  return [named || "", line.slice(at + 3)];
}

function graphView() {
  const view = element("div");
  const chooser = element("select", { id: "graph", "aria-label": "graph" });
  content.graphs.forEach((graph, i) => chooser.append(element("option", { value: i }, graph.name)));
  const only = element("input", { type: "checkbox", id: "only-edges" });
  const search = element("input", { type: "search", id: "search", placeholder: "filter by name or op" });
  const legend = axes.map((axis) =>
    element("span", { class: "chip", style: `background: ${colour(axis)}` }, `${axis}=${content.mesh[axis]}`),
  );
  const body = element("div", { id: "lines" });
  const draw = () => {
    const graph = content.graphs[chooser.value];
    const rows = new Map();
    const choose = (asked, event) => {
      event?.stopPropagation();
      const name = shownName(graph, asked);
      document.querySelectorAll(".row.chosen").forEach((row) => row.classList.remove("chosen"));
      const row = rows.get(name);
      if (row) {
        row.closest("details")?.setAttribute("open", "");
        row.classList.add("chosen");
        if (event && !event.target.closest?.(".row.chosen")) row.scrollIntoView({ block: "center" });
      }
      describe(graph, name, choose);
    };
    const words = search.value.trim().toLowerCase();
    body.replaceChildren(...graph.segments.map((segment) => segmentView(graph, segment, choose, rows, only.checked, words)));
  };
  for (const control of [chooser, only, search]) control.addEventListener("input", draw);
  view.append(
    element("div", { class: "bar" }, content.graphs.length > 1 ? chooser : null, element("label", {}, only, " collectives only"), search, ...legend),
    body,
  );
  draw();
  return view;
}

function segmentView(graph, segment, choose, rows, onlyEdges, words) {
  const lines = element("div", { class: "lines code" });
  let edges = 0;
  for (const line of segment.lines) {
    const [name] = split(line);
    const edge = graph.edges[name];
    if (edge) edges += 1;
    if (onlyEdges && !edge) continue;
    if (words && !line.toLowerCase().includes(words)) continue;
    const row = element("div", { class: `row${name ? " value" : ""}${edge ? " edge" : ""}` }, ...rich(line, choose));
    if (edge) {
      const times = edge.times > 1 ? ` ×${edge.times}` : "";
      row.append(element("span", { class: "sent" }, `   ⇄ ${edge.axes.join(".")}: ${bytes(edge.bytes)} a rank${times}   ${edge.cause}`));
    }
    if (name) {
      rows.set(name, row);
      row.addEventListener("click", () => choose(name));
    }
    lines.append(row);
  }
  if (!segment.layer) return lines.childElementCount ? lines : element("span");
  if ((onlyEdges || words) && !lines.childElementCount) return element("span");
  const title = segment.count > 1 ? `${segment.layers}: ${segment.count} equal layers` : segment.layers;
  const moved = edges ? `, ${edges} collective${edges > 1 ? "s" : ""}${segment.count > 1 ? " each" : ""}` : "";
  return element(
    "details",
    { class: "segment", open: true, "data-count": segment.count },
    element("summary", {}, element("b", {}, title), element("span", { class: "quiet" }, `  ${segment.lines.length} lines${moved}`)),
    lines,
  );
}

// ---------------------------------------------------------------- tables
function table(heads, rows) {
  const numeric = heads.map((_, i) => rows.length > 0 && rows.every((row) => typeof row[i] === "object" && row[i]?.number));
  const cell = (tag, value, i) => {
    const shown = value?.number ? [value.number] : Array.isArray(value) ? value : [value ?? ""];
    return element(tag, { class: numeric[i] ? "number" : null }, ...shown);
  };
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...heads.map((head, i) => cell("th", head, i)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value, i) => cell("td", value, i))))),
  );
}
const number = (text) => ({ number: String(text) });

function communicationView() {
  const parts = [element("h2", {}, "Sent by a rank in a step")];
  const rows = content.totals.map((t) => [PHASES[t.phase], t.axes, t.kind, number(t.count), number(bytes(t.bytes))]);
  parts.push(rows.length ? table(["phase", "axis", "collective", "count", "bytes"], rows) : element("p", {}, "Nothing: every rank works alone."));
  if (content.transfers.length) {
    parts.push(element("h2", {}, "Sent between stages, of a microbatch"));
    parts.push(table(["value", "from stage", "to stage", "line", "bytes"], content.transfers.map((t) => [`%${t.value}`, number(t.sender), number(t.receiver), t.source, number(bytes(t.bytes))])));
  }
  parts.push(element("h2", {}, "Parameters and inputs"));
  parts.push(
    table(
      ["name", "type", "a rank holds", "bytes", "the same in"],
      content.parameters.map((p) => [p.name, [element("span", { class: "code" }, ...rich(p.type))], `[${p.local.join(", ")}]`, number(bytes(p.bytes)), p.layers]),
    ),
  );
  if (content.diagnostics.length) parts.push(element("h2", {}, "Findings"), ...content.diagnostics.map((d) => element("pre", {}, d)));
  return element("div", {}, ...parts);
}

// ---------------------------------------------------------------- passes
function passesView() {
  if (!content.passes.length) return element("p", {}, "The program was loaded from a file: its passes are not known.");
  const chooser = element("select", { id: "pass", size: Math.min(content.passes.length, 24) });
  content.passes.forEach((one, i) => {
    const changed = one.added + one.removed ? `  +${one.added} -${one.removed}` : "";
    chooser.append(element("option", { value: i }, `${one.name}${one.graph === "step" ? "" : ` of ${one.graph}`}${changed}`));
  });
  const lines = element("div", { class: "lines code", id: "difference" });
  const draw = () => {
    const shown = content.passes[chooser.value].lines.map((line) =>
      element("div", { class: `row ${line[0] === "+" ? "added" : line[0] === "-" ? "removed" : line[0] === "@" ? "place" : ""}` }, ...rich(line)),
    );
    lines.replaceChildren(...(shown.length ? shown : [element("p", { class: "quiet" }, "nothing changed")]));
  };
  chooser.addEventListener("input", draw);
  chooser.value = content.passes.findIndex((one) => one.added + one.removed > 0);
  if (chooser.selectedIndex < 0) chooser.selectedIndex = 0;
  draw();
  return element("div", { style: "display: flex; gap: 16px; align-items: flex-start" }, chooser, element("div", { style: "flex: 1; min-width: 0" }, lines));
}

// ---------------------------------------------------------------- memory
function memoryView() {
  const memory = content.memory;
  const width = 900, height = 220, left = 70, bottom = 24;
  const most = Math.max(memory.peak, 1), count = Math.max(memory.steps.length, 1);
  const x = (i) => left + ((width - left) * i) / count;
  const y = (held) => height - bottom - ((height - bottom - 12) * held) / most;
  const peak = memory.steps.indexOf(Math.max(...memory.steps, 0));
  let path = `M ${left} ${y(memory.stored)}`;
  memory.steps.forEach((held, i) => (path += ` V ${y(memory.stored + held).toFixed(1)} H ${x(i + 1).toFixed(1)}`));
  const picture = drawing(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width: "100%", id: "memory", role: "img", "aria-label": "bytes held over a step" },
    drawing("rect", { x: left, y: y(memory.stored), width: width - left, height: height - bottom - y(memory.stored), fill: "#9ecbff", opacity: 0.5 }),
    drawing("path", { d: `${path} V ${y(memory.stored)} Z`, fill: "#ffd399", stroke: "#d1672a" }),
  );
  const label = (text, at, anchor = "end", kind = "") => {
    const made = drawing("text", { x: anchor === "end" ? left - 6 : at[0], y: at[1], "text-anchor": anchor, class: kind });
    made.textContent = text;
    picture.append(made);
  };
  label(bytes(memory.peak), [0, y(memory.peak) + 4]);
  if (memory.stored < memory.peak * 0.92) label(bytes(memory.stored), [0, y(memory.stored) + 4]);
  label("begin of the step", [left, height - 8], "start", "quiet");
  if (peak >= 0) picture.append(drawing("circle", { cx: x(peak + 0.5), cy: y(memory.peak), r: 4, fill: "#cf222e" }));
  return element(
    "div",
    {},
    element("p", {}, `Rank ${memory.rank}, which holds most: ${bytes(memory.peak)} at the peak, ${bytes(memory.stored)} of it all step long. `, element("span", { class: "code" }, memory.at)),
    picture,
    element("h2", {}, "By category"),
    table(["", "stored", "at the peak"], memory.rows.map(([what, stored, held]) => [what, number(bytes(stored)), number(bytes(held))])),
    element("h2", {}, "Largest at the peak"),
    table(["value", "", "type", "line", "bytes"], memory.largest.map(([name, what, type, source, held]) => [`%${name}`, what, [element("span", { class: "code" }, ...rich(type))], source, number(bytes(held))])),
  );
}

// ---------------------------------------------------------------- timeline
function timelineView() {
  const timeline = content.timeline;
  const rowHeight = 26, left = 70, width = 1000;
  const shades = { Forward: "#9ecbff", Backward: "#ffd399", Dgrad: "#ffd399", Wgrad: "#b4e6b4", Optimizer: "#e3b8f0" };
  const picture = drawing("svg", { viewBox: `0 0 ${width} ${timeline.works.length * rowHeight + 10}`, width: "100%", id: "timeline", role: "img", "aria-label": "timeline of the pipeline" });
  timeline.works.forEach((work, rank) => {
    const name = drawing("text", { x: 0, y: rank * rowHeight + 17 });
    name.textContent = `${content.pipeline}=${rank}`;
    picture.append(name);
    for (const event of work) {
      const x = left + ((width - left) * event.start) / timeline.makespan;
      const wide = ((width - left) * (event.end - event.start)) / timeline.makespan;
      const kind = event.what.split(" ")[0];
      const box = drawing("rect", { x, y: rank * rowHeight + 2, width: Math.max(wide - 0.5, 0.5), height: rowHeight - 4, fill: shades[kind] || "#c9d6df", class: "work" });
      const title = drawing("title");
      title.textContent = `${event.what}: stage ${event.stage}, microbatch ${event.microbatch}`;
      box.append(title);
      picture.append(box);
      if (wide > 16) {
        const text = drawing("text", { x: x + wide / 2, y: rank * rowHeight + 17, "text-anchor": "middle", style: "fill: #1f2328; pointer-events: none" });
        text.textContent = `${kind[0]}${event.microbatch}`;
        picture.append(text);
      }
    }
  });
  const share = (timeline.bubble * 100).toFixed(1);
  return element(
    "div",
    {},
    element("p", {}, `Predicted, as if sending took no time. Lengths are ${timeline.unit}, and no seconds: makespan ${timeline.makespan.toPrecision(4)}, bubble ${share} % of the work.`),
    picture,
  );
}

// ---------------------------------------------------------------- ranks
function ranksView() {
  const chooser = element("select", { id: "rank", "aria-label": "rank" });
  content.ranks.forEach((rank) => chooser.append(element("option", { value: rank.number }, `rank ${rank.number}`)));
  const body = element("div");
  const draw = () => {
    const rank = content.ranks[chooser.selectedIndex];
    body.replaceChildren(
      facts([
        ["coordinate", axes.map((axis) => `${axis}=${rank.coordinate[axis]}`).join(", ")],
        ...axes.map((axis) => [`group of ${axis}`, rank.groups[axis].join(", ")]),
        ["stages", content.pipeline ? rank.stages.join(", ") : ""],
      ]),
      element("h2", {}, "What it runs"),
      element("pre", { id: "list" }, rank.list.join("\n")),
    );
  };
  chooser.addEventListener("input", draw);
  draw();
  const more = content.world > content.ranks.length ? element("span", { class: "quiet" }, `the first ${content.ranks.length} of ${content.world}`) : null;
  return element("div", {}, element("div", { class: "bar" }, chooser, more), body);
}

// ---------------------------------------------------------------- the page
const VIEWS = { Graph: graphView, Communication: communicationView, Passes: passesView, Memory: memoryView, Timeline: content.timeline && timelineView, Ranks: ranksView };
const tabs = document.getElementById("tabs");
function open(name) {
  for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.textContent === name));
  showDetails();
  document.getElementById("view").replaceChildren(VIEWS[name]());
  history.replaceState?.(null, "", `#${name}`);
}
for (const [name, view] of Object.entries(VIEWS)) {
  if (view) tabs.append(element("button", { role: "tab", onclick: () => open(name) }, name));
}
const sent = content.totals.reduce((sum, row) => sum + row.bytes, 0);
const collectives = content.totals.reduce((sum, row) => sum + row.count, 0);
const findings = content.diagnostics.length;
document.getElementById("head").append(
  element("h1", {}, document.title),
  element("span", {}, `${content.world} ranks, ${axes.map((axis) => `${axis}=${content.mesh[axis]}`).join(", ")}`),
  element("span", { class: "quiet" }, `${collectives} collectives, ${bytes(sent)} sent by a rank; ${bytes(content.memory.peak)} held at the peak`),
  element("span", { class: "quiet" }, findings ? `${findings} finding${findings > 1 ? "s" : ""}` : ""),
);
const wanted = decodeURIComponent(location.hash.slice(1));
open(VIEWS[wanted] ? wanted : "Graph");
document.body.dataset.ready = String(Math.round(performance.now()));

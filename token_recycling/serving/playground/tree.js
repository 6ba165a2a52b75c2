// The draft tree of a step as SVG: the accepted path first, in a straight line, all other branches below it.

import { parity, svgElement, visible } from "./dom.js";

const [ROW, HEIGHT, GAP, BEND, PADDING, MARGIN] = [28, 22, 30, 6, 8, 6];
const measure = document.createElement("canvas").getContext("2d");

/**
 * The nodes of a step with their rows: the draft's nodes, and the model's own token with the text `ownText` after the
 * accepted path. Each has `text`, `token`, `depth`, `parent`, `role` (root, accepted, own, rejected), `row` and
 * `children`.
 */
export function layout(step, ownText) {
  const { parents, tokens, texts } = step.draft;
  const path = new Set(step.path);
  const nodes = tokens.map((token, at) => ({
    token,
    text: texts[at],
    parent: parents[at],
    depth: parents[at] < 0 ? 0 : null,
    role: at === 0 ? "root" : path.has(at) ? "accepted" : "rejected",
    children: [],
  }));
  addOwn(nodes, step, ownText);
  nodes.forEach((node, at) => {
    if (node.parent < 0) return;
    node.depth = nodes[node.parent].depth + 1;
    nodes[node.parent].children.push(at);
  });
  const lit = (at) => isLit(nodes[at]);
  for (const node of nodes) node.children.sort((one, other) => lit(other) - lit(one) || one - other);
  placeRows(nodes);
  return nodes;
}

/** Adds the last token of a step, which may be a drafted token at the length limit. */
function addOwn(nodes, step, text) {
  const [last, token] = [step.path.at(-1), step.tokens.at(-1)];
  const drafted = nodes.find((node) => node.parent === last && node.token === token);
  if (drafted) drafted.role = "own";
  else nodes.push({ token, text, parent: last, depth: null, role: "own", children: [] });
}

function placeRows(nodes) {
  let row = 0;
  const waiting = [0];
  while (waiting.length) {
    const node = nodes[waiting.pop()];
    node.row = row;
    if (!node.children.length) row += 1;
    waiting.push(...node.children.toReversed());
  }
}

/** The drawing of a step of a run. */
export function treeOf(run, index, description) {
  const step = run.steps[index];
  // The own token's text as root of the next step: in `texts`, it may be empty (part of a character).
  const nodes = layout(step, run.steps[index + 1]?.draft.texts[0] ?? step.texts.at(-1));
  measure.font = `13px ${getComputedStyle(document.body).getPropertyValue("--mono")}`;
  const labels = nodes.map((node) => visible(node.text));
  const widths = labels.map((label) => Math.max(HEIGHT, measure.measureText(label).width + 2 * PADDING));
  const columns = columnStarts(nodes, widths);
  const place = (at) => ({
    left: columns[nodes[at].depth],
    right: columns[nodes[at].depth] + widths[at],
    y: nodes[at].row * ROW + ROW / 2,
  });
  const width = Math.max(...nodes.map((_, at) => place(at).right)) + MARGIN;
  const height = (Math.max(...nodes.map((node) => node.row)) + 1) * ROW;
  const order = [...nodes.keys()].sort((one, other) => isLit(nodes[one]) - isLit(nodes[other]));
  return svgElement(
    "svg",
    { class: parity(index), width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description },
    ...order.filter((at) => nodes[at].parent >= 0).map((at) => edge(nodes[at], place(nodes[at].parent), place(at))),
    ...nodes.map((node, at) => pill(node, labels[at], place(at))),
  );
}

const isLit = (node) => node.role !== "rejected";

function columnStarts(nodes, widths) {
  const widest = [];
  nodes.forEach((node, at) => (widest[node.depth] = Math.max(widest[node.depth] ?? 0, widths[at])));
  let left = MARGIN;
  return widest.map((wide) => {
    const start = left;
    left += wide + GAP;
    return start;
  });
}

/** An edge from a node's right side to its child's left: straight in a row, else down a shared stem near the child. */
function edge(node, from, to) {
  const stem = to.left - GAP / 2;
  const begin = `M${from.right} ${from.y}`;
  const down = `H${stem - BEND}q${BEND} 0 ${BEND} ${BEND}V${to.y - BEND}q0 ${BEND} ${BEND} ${BEND}`;
  const line = from.y === to.y ? `${begin}H${to.left}` : `${begin}${down}H${to.left}`;
  return svgElement("path", { class: `edge ${node.role}`, d: line });
}

const ROLE_LABELS = {
  root: "the newest token before this step",
  accepted: "drafted and accepted",
  own: "the model’s own",
  rejected: "drafted and rejected",
};

function pill(node, label, { left, right, y }) {
  const title = `${JSON.stringify(node.text)}, token ${node.token}: ${ROLE_LABELS[node.role]}`;
  return svgElement(
    "g",
    { class: `node ${node.role}` },
    svgElement("title", {}, title),
    svgElement("rect", { x: left, y: y - HEIGHT / 2, width: right - left, height: HEIGHT, rx: 5 }),
    svgElement("text", { x: (left + right) / 2, y: y + 0.5 }, label),
  );
}

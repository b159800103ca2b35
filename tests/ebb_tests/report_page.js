// Runs the script of a report's page without a browser, and tells what it put where.
// Arguments: the page, and, if not empty, which budget is chosen in the list of its plan.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");
const data = page.match(/<script type="application\/json" id="data">(.*?)<\/script>/s)[1];
const script = page.match(/<script>(.*?)<\/script>/s)[1];

const elements = {};
function element(id) {
  const self = { innerHTML: "", textContent: "", value: "", checked: false, style: {}, dataset: {} };
  self.hidden = page.includes(`id="${id}" hidden`);
  self.setAttribute = () => {};
  self.getBoundingClientRect = () => ({ left: 0, width: 1140 });
  self.querySelectorAll = () => [];
  self.insertAdjacentHTML = (_, html) => { self.innerHTML += html; };
  self.lastElementChild = { setAttribute() {} };
  return self;
}
globalThis.innerWidth = globalThis.innerHeight = 1000;
globalThis.document = {
  getElementById(id) {
    if (!page.includes(`id="${id}"`)) throw new Error(`the page has no ${id}`);
    return (elements[id] ??= element(id));
  },
};
elements.data = { ...element("data"), textContent: data };
(0, eval)(script);
if (process.argv[3]) {
  elements["plan-budget"].value = process.argv[3];
  elements["plan-budget"].onchange();
}
const moved = {};
if (elements.memory.onmousemove) {
  elements.memory.onmousemove({ clientX: 600, clientY: 10 });
  moved.memory = elements.tip.textContent;
}
const found = Object.fromEntries(Object.entries(elements).map(([id, one]) =>
  [id, { html: one.innerHTML, text: one.textContent, hidden: one.hidden, moved: moved[id] }]));
console.log(JSON.stringify(found));

// What a reader would trip over on this page: a list of texts.
const faults = [];
const root = document.documentElement;
const short = (text) => text.trim().replace(/\s+/g, " ").slice(0, 60);
const seen = (element) => {
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  return style.visibility !== "hidden" && style.display !== "none" && style.opacity !== "0" && box.width > 1 && box.height > 1;
};

if (root.scrollWidth > innerWidth + 1) {
  faults.push(`scrolls sideways: ${root.scrollWidth} px wide in ${innerWidth}`);
}

// An element may be wider than the page only inside something that scrolls by itself, such as a table or a code block.
const scrolls = (element) => {
  for (let up = element; up && up !== document.body; up = up.parentElement) {
    if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(up).overflowX)) return true;
  }
  return false;
};
const article = document.querySelector("article") || document.body;
for (const element of article.querySelectorAll("*")) {
  const box = element.getBoundingClientRect();
  if (seen(element) && box.right > innerWidth + 1 && !scrolls(element)) {
    faults.push(`sticks out to ${Math.round(box.right)} px: <${element.tagName.toLowerCase()}> ${short(element.textContent)}`);
    break;
  }
}

for (const image of document.images) {
  if (!image.complete || image.naturalWidth === 0) faults.push(`image does not load: ${image.src}`);
  if (!image.alt) faults.push(`image without text: ${image.src}`);
}

// Contrast, as WCAG defines it; 3 is the least for large text.
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const over = (top, below) => {
  const a = top[3] / 255;
  return [0, 1, 2].map((k) => top[k] * a + below[k] * (1 - a)).concat(255);
};
const background = (element) => {
  const layers = [];
  for (let up = element; up; up = up.parentElement) layers.push(rgba(getComputedStyle(up).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 255]);
};
const light = (colour) =>
  colour
    .slice(0, 3)
    .map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
const faint = new Set();
const walk = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
for (let node = walk.nextNode(); node; node = walk.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || !seen(element) || element.closest("svg, .headerlink, .md-clipboard, .md-code__nav")) continue;
  const below = background(element);
  const [a, b] = [light(over(rgba(getComputedStyle(element).color), below)), light(below)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 3) faint.add(`contrast ${ratio.toFixed(1)}: ${short(node.data)}`);
}
faults.push(...[...faint].slice(0, 3));

// Blocks of the text lie below one another.
const blocks = [...article.querySelectorAll("h1, h2, h3, h4, p, li, pre, table, img, figure")].filter(seen);
for (let k = 1; k < blocks.length; k++) {
  const [one, two] = [blocks[k - 1], blocks[k]];
  if (one.contains(two) || two.contains(one)) continue;
  const [a, b] = [one.getBoundingClientRect(), two.getBoundingClientRect()];
  const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  if (high > 4 && wide > 4 && !one.closest("table, li, .admonition, .grid") && getComputedStyle(one).float === "none") {
    faults.push(`overlap of ${Math.round(high)} px: ${short(one.textContent) || one.tagName} / ${short(two.textContent) || two.tagName}`);
  }
}
return faults;

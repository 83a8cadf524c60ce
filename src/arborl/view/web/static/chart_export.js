// A chart as a file: its values as CSV, its picture as PNG. Both are made in the browser.

const SCALE = 2, PAD = 12, HEAD = 30, ROW = 18;

/**
 * The values in view as CSV, one row a point: the line's name, the horizontal axis (or all columns of the line), the value, and the ends of
 * the band and the smoothed value if there are any. A value that is not finite is an empty cell.
 */
export function csvOf(lines, { xName, view = null, much = 0 }) {
  const axes = [...new Set(lines.flatMap((line) => Object.keys(line.columns ?? { [xName]: line.x })))];
  const banded = lines.some((line) => line.low);
  const head = ["series", ...axes, "value", ...(banded ? ["low", "high"] : []), ...(much ? ["smoothed"] : [])];
  const rows = lines.flatMap((line) => line.x.map((x, at) => at).filter((at) => !view || (line.x[at] >= view[0] && line.x[at] <= view[1])).map((at) => [
    text(line.name), ...axes.map((name) => (line.columns ?? { [xName]: line.x })[name]?.[at]), line.y[at],
    ...(banded ? [line.low?.[at], line.high?.[at]] : []), ...(much ? [line.soft?.[at]] : []),
  ]));
  return [head.map(text), ...rows].map((row) => `${row.map((cell) => cell ?? "").join(",")}\r\n`).join("");
}

/** A cell of text: quoted if needed, and no formula for a spreadsheet. */
function text(value) {
  const plain = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/** The picture of a chart with its title and the names of its lines. */
export function pngOf(svg, { title, xName, lines }) {
  const [width, height] = [Number(svg.getAttribute("width")) + 2 * PAD, Number(svg.getAttribute("height"))];
  const canvas = document.createElement("canvas");
  canvas.width = width * SCALE;
  canvas.height = (HEAD + height + ROW * (lines.length + 1) + PAD) * SCALE;
  const pen = canvas.getContext("2d"), page = getComputedStyle(document.body), card = getComputedStyle(svg.closest(".chart"));
  pen.scale(SCALE, SCALE);
  pen.fillStyle = card.backgroundColor;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  write(pen, title, PAD, 20, page.color, `600 14px ${page.fontFamily}`);
  pen.save();
  pen.translate(PAD, HEAD);
  for (const shape of svg.querySelectorAll("line, path, circle, text")) paint(pen, shape);
  pen.restore();
  write(pen, xName, width - PAD, HEAD + height + 10, page.color, `12px ${page.fontFamily}`, "right");
  lines.forEach((line, at) => {
    const y = HEAD + height + ROW * (at + 1) + 8;
    pen.fillStyle = colourOf(svg, line.colour);
    pen.fillRect(PAD, y - 9, 10, 10);
    write(pen, line.name, PAD + 16, y, page.color, `12px ${page.fontFamily}`);
  });
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

function paint(pen, shape) {
  const style = getComputedStyle(shape), value = (name) => Number(shape.getAttribute(name));
  const clipped = shape.closest("g[clip-path]") && shape.ownerSVGElement.querySelector("clipPath rect");
  pen.save();
  if (clipped) {
    pen.beginPath();
    pen.rect(...["x", "y", "width", "height"].map((name) => Number(clipped.getAttribute(name))));
    pen.clip();
  }
  pen.globalAlpha = Number(style.opacity) * (shape.tagName === "path" && style.fill !== "none" ? Number(style.fillOpacity) : 1);
  if (shape.tagName === "text") {
    write(pen, shape.textContent, value("x"), value("y"), style.fill, `${style.fontSize} ${style.fontFamily}`, { middle: "center", end: "right" }[shape.getAttribute("text-anchor")]);
  } else {
    const trace = shape.tagName === "path" ? new Path2D(shape.getAttribute("d")) : new Path2D();
    if (shape.tagName === "line") { trace.moveTo(value("x1"), value("y1")); trace.lineTo(value("x2"), value("y2")); }
    if (shape.tagName === "circle") trace.arc(value("cx"), value("cy"), value("r"), 0, 2 * Math.PI);
    if (style.fill !== "none" && shape.tagName !== "line") { pen.fillStyle = style.fill; pen.fill(trace); }
    if (style.stroke !== "none") {
      pen.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.match(/[\d.]+/g).map(Number));
      [pen.strokeStyle, pen.lineWidth, pen.lineJoin] = [style.stroke, parseFloat(style.strokeWidth), "round"];
      pen.stroke(trace);
    }
  }
  pen.restore();
}

function write(pen, words, x, y, colour, font, align = "left") {
  [pen.font, pen.fillStyle, pen.textAlign] = [font, colour, align];
  pen.fillText(words, x, y);
}

function colourOf(svg, name) {
  return getComputedStyle(svg.querySelector(`.line.${name}`) ?? svg).stroke;
}

/** Offer a blob as a file to save. */
export function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 30_000);
}

// Run in a page: every piece of visible text whose contrast with what is behind it is too low for WCAG's level AA.
() => {
  const parse = (text) => { const all = text.match(/[\d.]+/g).map(Number); return { rgb: all.slice(0, 3), a: all.length > 3 ? all[3] : 1 }; };
  const over = (top, under) => top.rgb.map((one, at) => one * top.a + under[at] * (1 - top.a));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => one / 255).map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest(":disabled, noscript, .skip, svg")) continue;
    const style = getComputedStyle(element), ground = behind(element);
    const [one, other] = [light(over(parse(style.color), ground)), light(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (one + 0.05) / (other + 0.05);
    if (contrast < (large ? 3 : 4.5)) bad.push(`${element.tagName}.${element.className}: ${walker.currentNode.data.trim().slice(0, 30)} ${contrast.toFixed(2)}`);
  }
  return [...new Set(bad)];
}

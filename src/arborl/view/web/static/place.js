// The state of a page is in its URL, so that a link restores it.

/** {page, one(name), all(name)} of the address. */
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(query || "");
  return {
    page: path || "runs",
    params,
    one: (name, fallback = "") => params.get(name) ?? fallback,
    all: (name) => params.getAll(name),
    place: () => Object.fromEntries(["run", "kind", "step", "line"].map((name) => [name, params.get(name)])),
  };
}

/** The address of a page. */
export function link(page, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(key, one);
    }
  }
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

/** Go there: a new entry of the history. */
export function go(page, params) {
  location.hash = link(page, params);
}

/** Change a few values of the present address, without a new entry and without drawing the page again. */
export function note(changes) {
  const now = here();
  const params = {};
  for (const key of new Set(now.params.keys())) params[key] = now.params.getAll(key);
  history.replaceState(null, "", link(now.page, { ...params, ...changes }));
}

// Requests to the server. Responses are data; the pages insert them as text.

export async function get(path, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(key, one);
    }
  }
  const answer = await fetch(`/api/${path}?${query}`);
  const body = await answer.json().catch(() => ({ detail: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(typeof body.detail === "string" ? body.detail : JSON.stringify(body.detail));
  return body;
}

/** Write: the server accepts it from its own pages only. */
export async function send(path, params, body) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(params)}`, { method: "PUT", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const found = await answer.json().catch(() => ({ detail: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(typeof found.detail === "string" ? found.detail : JSON.stringify(found.detail));
  return found;
}

// What the server is asked. Answers are data; the pages make text of them.

export async function get(path, params = {}) {
  const asked = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") asked.append(key, one);
    }
  }
  const answer = await fetch(`/api/${path}?${asked}`);
  const body = await answer.json().catch(() => ({ detail: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(typeof body.detail === "string" ? body.detail : JSON.stringify(body.detail));
  return body;
}

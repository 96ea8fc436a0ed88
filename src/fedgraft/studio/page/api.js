// Requests to the studio's server: relative addresses, so that the secret path in front of them stays where it is.
export const boot = {};

async function answer(response) {
  if (response.status === 403 || response.status === 421) throw new Error(await response.text());
  const data = await response.json();
  if (!response.ok) throw Object.assign(new Error(data.message), { code: data.code });
  return data;
}

export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value === undefined || value === null || value === "") continue;
    for (const item of Array.isArray(value) ? value : [value]) query.append(key, item);
  }
  const text = query.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

export const get = async (path, parameters) => answer(await fetch(address(path, parameters)));

export const post = async (path, body) =>
  answer(await fetch(`api/${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-fedgraft-action": boot.action },
    body: JSON.stringify(body),
  }));

// Follow the server's events; `react` gets the names of the runs that changed. Returns a function that ends it.
export function follow(react, state) {
  const source = new EventSource("api/events");
  source.addEventListener("runs", event => react(JSON.parse(event.data)));
  source.addEventListener("open", () => state(true));
  source.addEventListener("error", () => state(false));
  return () => source.close();
}

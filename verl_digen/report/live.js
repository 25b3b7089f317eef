// -- a page of `digen watch`: loads itself again when its run has changed, and keeps what somebody chose -----
const POLL_MS = 5000, QUIET_MS = 4000;  // no reload so soon after the last move of the mouse

function live() {
  const place = `digen ${location.pathname}${location.search}`;
  const kept = JSON.parse(sessionStorage.getItem(place) || "{}");
  const controls = "main input, main select, main button[aria-pressed], main details";
  const nameOf = (node) => node.id || `${node.closest("section").id} ${[...node.closest("section").querySelectorAll(node.tagName)].indexOf(node)}`;
  const said = (node) => node.parentElement.querySelector("output")?.textContent;
  let touched = 0;

  function remember(node) {
    const value = node.tagName === "DETAILS" ? node.open : node.tagName === "BUTTON" ? node.getAttribute("aria-pressed") : node.type === "checkbox" ? node.checked
      : node.type === "range" ? [node.value, said(node)] : node.tagName === "SELECT" ? node.selectedOptions[0].textContent : node.value;
    if (node.type === "range" && node.value === node.max) delete kept[nameOf(node)];  // the newest, also later
    else kept[nameOf(node)] = value;
    sessionStorage.setItem(place, JSON.stringify(kept));
  }

  function restore(node, value) {
    const set = (chosen) => { node.value = chosen; node.dispatchEvent(new Event(node.tagName === "SELECT" ? "change" : "input")); };
    if (node.tagName === "DETAILS") node.open = value;
    else if (node.tagName === "BUTTON") { if (node.getAttribute("aria-pressed") !== value) node.click(); }
    else if (node.type === "checkbox") { node.checked = value; node.dispatchEvent(new Event("change")); }
    else if (node.type === "range") {
      set(value[0]);
      for (let at = 0; said(node) !== value[1] && at <= Number(node.max); at++) set(at);  // the page shows other steps now
    } else if (node.tagName === "SELECT") { const found = [...node.options].find((one) => one.textContent === value); if (found) set(found.value); }
    else set(value);
  }

  for (const node of document.querySelectorAll(controls)) if (nameOf(node) in kept) restore(node, kept[nameOf(node)]);
  for (const kind of ["input", "change", "click", "toggle"]) document.addEventListener(kind, (event) => { const node = event.target.closest?.(controls); if (node) remember(node); }, kind === "toggle");
  document.addEventListener("pointermove", () => { touched = Date.now(); });

  const word = el("span", { class: "tag", id: "live" }, "live");
  if (data.runs === undefined || !data.root) document.querySelector(".bar").prepend(el("a", { class: "back", href: "./" }, "All runs"));
  document.getElementById("dark").before(word);
  async function poll() {
    if (document.hidden) return;
    let answer;
    try { answer = await fetch(location.href, { method: "HEAD", cache: "no-store" }); } catch { word.textContent = "digen watch has ended"; return; }
    word.textContent = answer.ok ? "live" : answer.status === 404 ? "the run is gone" : `error ${answer.status}`;
    if (answer.ok && answer.headers.get("etag") !== data.etag && Date.now() - touched > QUIET_MS) location.reload();
  }
  setInterval(poll, POLL_MS);
  document.addEventListener("visibilitychange", poll);
}

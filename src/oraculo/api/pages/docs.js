// Shows the API page. Where the server has keys, it asks for one first. The key goes out in a header only, and is kept
// in this tab's sessionStorage, which ends with the tab.
"use strict";

const TEXTS = {
  en: {
    ask: "API key",
    open: "Open",
    note: "The key is kept in this tab only, and sent to this server only.",
    forget: "Use another key",
    wrong: "The server does not know this key.",
    unreachable: "The server does not answer. Try again.",
  },
  pt: {
    ask: "Chave da API",
    open: "Abrir",
    note: "A chave fica só nesta aba e só vai para este servidor.",
    forget: "Usar outra chave",
    wrong: "O servidor não conhece esta chave.",
    unreachable: "O servidor não responde. Tente de novo.",
  },
};
const PLACE = "oraculo-api-key";
const language = navigator.language.toLowerCase().startsWith("pt") ? "pt" : "en";
const texts = TEXTS[language];
const by = (id) => document.getElementById(id);

// A header holds bytes: those of the key in UTF-8, as the server compares them.
const asHeader = (key) => String.fromCharCode(...new TextEncoder().encode(key));

function say() {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = texts[element.dataset.text];
}

async function start(key) {
  const headers = key ? { "X-API-Key": asHeader(key) } : {};
  let reply;
  try {
    reply = await fetch("openapi.json", { headers, cache: "no-store" });
  } catch {
    return ask(texts.unreachable);
  }
  if (reply.status === 401) return ask(key ? texts.wrong : "");
  const body = await reply.json();
  if (!reply.ok) return ask(body.detail);
  if (key) sessionStorage.setItem(PLACE, key);
  show(body, key);
}

function ask(fault) {
  sessionStorage.removeItem(PLACE);
  by("fault").textContent = fault;
  by("ask").hidden = false;
  by("key").select();
  by("key").focus();
}

function show(spec, key) {
  by("ask").hidden = true;
  by("key").value = "";
  by("forget").hidden = !key;
  const page = SwaggerUIBundle({
    spec,
    dom_id: "#swagger-ui",
    deepLinking: true,
    displayRequestDuration: true,
    filter: true,
    tryItOutEnabled: true,
    onComplete: () => key && page.preauthorizeApiKey("api_key", asHeader(key)),
  });
}

by("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start(by("key").value.trim());
});
by("forget").addEventListener("click", () => {
  sessionStorage.removeItem(PLACE);
  location.reload();
});
localStorage.removeItem("authorized"); // where the page kept a key before
say();
start(sessionStorage.getItem(PLACE) || "");

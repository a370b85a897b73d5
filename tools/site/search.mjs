// The page of the search: Pagefind finds, and this lists the sections that it found.
import * as pagefind from "../pagefind/pagefind.js";

const PAGES = 20; // that are listed
const SECTIONS = 3; // of each

const field = document.querySelector(".bd-search-container input");
const said = document.getElementById("search-said");
const list = document.getElementById("search-results");

function link(url, text) {
  const element = document.createElement("a");
  element.href = url;
  element.textContent = text;
  return element;
}

/** What surrounds the words, which Pagefind marks; all else in it is escaped. */
function excerpt(html) {
  const element = document.createElement("p");
  element.innerHTML = html;
  return element;
}

function entry(page) {
  const item = document.createElement("li");
  // The page's own beginning is a section too, and named as the page.
  const sections = page.sub_results.toSorted((one, other) => best(other) - best(one)).slice(0, SECTIONS);
  item.append(link(page.url, page.meta.title));
  for (const section of sections) {
    if (section.url !== page.url) item.append(link(section.url, section.title));
    item.append(excerpt(section.excerpt));
  }
  return item;
}

const best = section => Math.max(0, ...section.weighted_locations.map(place => place.balanced_score));

async function find(words) {
  const { results } = await pagefind.search(words);
  return Promise.all(results.slice(0, PAGES).map(result => result.data()));
}

async function search(words) {
  list.replaceChildren();
  said.textContent = "";
  if (!words.trim()) return;
  let pages = await find(words);
  // Of a name that is nowhere Pagefind finds the beginning. fp8_dot may be Fp8DotGeneralOp.
  const isName = words.includes("_") && !pages.some(page => page.content.includes(words));
  if (isName) pages = await find(words.replaceAll("_", ""));
  said.textContent = pages.length ? "" : `No page has ${words}.`;
  list.replaceChildren(...pages.map(entry));
  document.body.dataset.searched = words; // tests wait for it
}

await pagefind.options({ excerptLength: 24, highlightParam: "highlight" });
field.value = new URLSearchParams(location.search).get("q") ?? "";
field.focus();
await search(field.value);

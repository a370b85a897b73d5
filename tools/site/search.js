// How Sphinx's search orders what it finds, and what it shows of a page. Sphinx loads this behind its
// own script. search.py has the index.

var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  // The section of a public name, or the page of a rule, comes first where its name is the query. Then
  // comes a page whose title has a word of the query. The path comes before the later chapters, and what
  // is about the course itself, and each rule's page, after the references.
  score: ([page, title, anchor, description, score, file, kind]) => {
    const name = title.split(" > ").pop().toLowerCase();
    if (kind === "title" && name === asked.name && /^(api|rules)\//.test(page)) return score + 30;
    if (asked.words.some((word) => name.includes(word))) score += 3;
    const places = [
      [/^api\//, 0],
      [/^notebooks\/0[1-6]_/, 4],
      [/^(notebooks\/\d|fp8lens\/)/, 2],
      [/^(rules\/(?!index)|tools\/|CONTRIBUTING|CHANGELOG|cite)/, -2],
    ];
    const place = places.find(([pattern]) => pattern.test(page));
    return place ? score + place[1] : score;
  },
};

// What the reader asks for: the words as the index has them, such as "scale" for "scaled".
const asked = { name: "", words: [] };

// Numbers are words too: Sphinx leaves them out of a query.
const parseWithoutNumbers = Search._parseQuery;
Search._parseQuery = (query) => {
  const parsed = parseWithoutNumbers(query);
  const [, words, , highlighted] = parsed;
  for (const number of splitQuery(query).filter((word) => /^\d+$/.test(word))) {
    words.add(number);
    highlighted.add(number);
  }
  asked.name = query.toLowerCase().trim();
  asked.words = [...words];
  if (SPHINX_HIGHLIGHT_ENABLED) {
    localStorage.setItem("sphinx_highlight_terms", [...highlighted].join(" "));
  }
  return parsed;
};

// An excerpt shows what a page says, and none of its buttons.
Search.htmlToText = (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const article = page.querySelector("article.bd-article");
  if (!article) return "";
  const furniture = "button, summary, script, style, svg, .headerlink, .prompt";
  article.querySelectorAll(furniture).forEach((element) => element.remove());
  // What stands in a block of its own is no word with what stands in the next.
  const blocks = "p, li, td, th, pre, h1, h2, h3, h4, br, div";
  article.querySelectorAll(blocks).forEach((element) => element.after(" "));
  const place = anchor && page.getElementById(decodeURIComponent(anchor.slice(1)));
  const text = (place || article).textContent;
  return text.replace(/\s+/g, " ").trim();
};

const EXCERPT = 240; // characters
Search.makeSearchSummary = (html, words, anchor) => {
  const text = Search.htmlToText(html, anchor);
  if (!text) return null;
  const [start, end] = excerptOf(text, [...words]);
  const summary = document.createElement("p");
  summary.classList.add("context");
  const before = start > 0 ? "… " : "";
  const after = end < text.length ? " …" : "";
  summary.textContent = before + text.slice(start, end).trim() + after;
  return summary;
};

// Where the part of a text begins and ends that has most of the words.
function excerptOf(text, words) {
  const found = words.flatMap((word) => {
    const beginning = new RegExp(`(?<![\\p{L}\\p{N}_])${_escapeRegExp(word)}`, "giu");
    const whole = new RegExp(`${beginning.source}(?![\\p{L}\\p{N}_])`, "giu");
    const matches = [...text.matchAll(/^\d+$/.test(word) ? whole : beginning)];
    return matches.map((match) => ({ word, at: match.index }));
  });
  found.sort((one, other) => one.at - other.at);
  let best = { at: 0, count: 0 };
  found.forEach(({ at }, number) => {
    const near = found.slice(number, number + 50).filter((other) => other.at < at + EXCERPT / 2);
    const count = new Set(near.map((other) => other.word)).size;
    if (count > best.count) best = { at, count };
  });
  let start = Math.max(best.at - EXCERPT / 3, 0);
  if (start > 0) start = Math.min(text.indexOf(" ", start) + 1, best.at);
  const end = text.indexOf(" ", start + EXCERPT);
  return [start, end < 0 ? text.length : end];
}

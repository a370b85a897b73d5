// The theme makes what has to be scrolled reachable by the keyboard, when a page loads or the window
// changes its size. What stands in a fold has no size until the fold is opened.
document.addEventListener("toggle", (event) => {
  window.dispatchEvent(new Event("resize"));
  // An answer and its explanation are one click: the explanation opens and closes with the answer.
  const answered = event.target.matches("details.below-input") && event.target.closest(".cell");
  const next = answered && answered.nextElementSibling;
  if (next && next.matches("details:not([class])")) next.open = event.target.open;
}, true);

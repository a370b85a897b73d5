// The theme makes what has to be scrolled reachable by the keyboard, when a page loads or the window
// changes its size. What stands in a fold has no size until the fold is opened.
document.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")), true);

// Reads an HLO dump in the browser, with fp8lens itself.
export default {
  render({ model, el }) {
    const said = document.createElement("p");
    said.textContent = "An explorer.";
    el.append(said);
  },
};

"""The colours of all pictures."""

# Black to the eye, and found again in the SVG: what is drawn in it takes the page's own ink.
INK = "#010203"
# Okabe and Ito's colours, distinguishable with the common colour-vision deficiencies:
# https://jfly.uni-koeln.de/color/
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)

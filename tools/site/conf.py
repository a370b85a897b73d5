"""Sphinx's settings for the site. What this project adds to Sphinx is in the extensions of
`tools.site` that are listed here.

The title and the table of contents are myst.yml's, whose form build.py has looked at.
"""

import logging
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE_URL = os.environ.get("SITE_URL", "")  # where the site will stand
if SITE_URL:
    SITE_URL = SITE_URL.rstrip("/") + "/"

language, root_doc = "en", "index"
extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    "tools.site.pages",
    "tools.site.repository",
    "tools.site.glossary",
    "tools.site.rules",
    "tools.site.api",
    "tools.site.explorers",
    "tools.site.cite",
    "tools.site.footer",
    "tools.site.search",
]
if SITE_URL:
    extensions.append("sphinx_sitemap")
# Text
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "tools.site.pages.jupyter_anchor"
# Notebooks: shown as they are stored
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict] = {}  # a widget needs a kernel, which a page has not
# Pages
html_theme = "sphinx_book_theme"
templates_path = ["templates"]
html_search_scorer = str(HERE / "search.js")
html_css_files, html_js_files = ["style.css", "icons.css"], ["folds.js"]
html_static_path = [str(HERE / name) for name in html_css_files + html_js_files]
html_use_index = html_domain_indices = False
html_math_renderer = "mathml"
html_baseurl = SITE_URL
html_theme_options = {
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "toc_title": "On this page",
    "use_fullscreen_button": False,
    "footer_content_items": ["page-footer.html"],
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["search-button-field.html", "sbt-sidebar-nav.html"]}
copybutton_selector = "div.highlight:not(.cell_output *) > pre"
# What is shown of a page where somebody shares a link to it
ogp_site_url, ogp_enable_meta_description = SITE_URL, True
ogp_social_cards = {"enable": bool(SITE_URL), "image_mini": "img/one_call.png"}
# It looks for weights that the font lacks, and says so.
logging.getLogger("matplotlib.font_manager").setLevel("ERROR")
sitemap_url_scheme, sitemap_excludes = "{link}", ["search.html"]

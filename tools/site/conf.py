"""Sphinx's settings for the site. What this project adds to Sphinx is in the extensions of
`tools.site` that are listed here. The title and the table of contents are myst.yml's.
"""

import os
import tomllib
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
# Where the repository is; the workflow that publishes the site sets the variable.
REPOSITORY = os.environ.get("REPOSITORY_URL") or PROJECT["project"]["urls"].get("Repository", "")
SITE_URL = os.environ.get("SITE_URL", "")  # where the site will stand

language, root_doc = "en", "index"
version = PROJECT["project"]["version"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxext.opengraph",
    "tools.site.course_pages",
    "tools.site.glossary",
    "tools.site.rule_pages",
    "tools.site.explorers",
    "tools.site.policy",
]
# Text
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
myst_heading_slug_func = "tools.site.course_pages.jupyter_anchor"
# Notebooks: shown as they are stored
nb_execution_mode = "off"
nb_merge_streams = True  # what a cell writes in pieces, as JupyterLab does
nb_ipywidgets_js: dict[str, dict] = {}  # a widget needs a kernel, which a page has not
# The page of the public names. Their docstrings have code in single backticks.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False
autosummary_ignore_module_all = False
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
# Pages
html_theme = "sphinx_book_theme"
templates_path = ["templates"]
html_css_files, html_js_files = ["style.css", "icons.css"], ["folds.js", "sort.js"]
html_static_path = [str(HERE / name) for name in [*html_css_files, *html_js_files, "search.mjs"]]
html_additional_pages = {"search": "search.html"}  # its own: Pagefind's index, not Sphinx's
html_use_index = html_domain_indices = False
html_math_renderer = "mathml"
html_theme_options = {
    "navbar_persistent": [],
    "logo": {"text": "FP8 matmuls in JAX"},
    "article_header_start": ["toggle-primary-sidebar.html", "version.html"],
    "home_page_in_toc": True,
    "max_navbar_depth": 1,  # the rules' pages are reached from their index
    "show_toc_level": 2,
    "toc_title": "On this page",
    "use_fullscreen_button": False,
    "footer_content_items": [],
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto", "jax_version": metadata.version("jax")}
html_sidebars = {
    "**": ["logo.html", "search-button-field.html", "sbt-sidebar-nav.html"],
}
copybutton_selector = "div.highlight:not(.cell_output *) > pre"
# What is shown of a page where somebody shares a link to it
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}
if SITE_URL:
    extensions.append("sphinx_sitemap")
    html_baseurl = ogp_site_url = SITE_URL.rstrip("/") + "/"
    ogp_image = f"{ogp_site_url}_static/one_call.png"
    sitemap_url_scheme, sitemap_excludes = "{link}", ["search.html"]
if REPOSITORY:
    html_theme_options |= {
        "repository_url": REPOSITORY,
        "repository_branch": "main",
        "use_repository_button": True,
        "use_source_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
        "launch_buttons": {  # Binder installs what binder/postBuild says
            "binderhub_url": "https://mybinder.org",
            "notebook_interface": "jupyterlab",
        },
    }

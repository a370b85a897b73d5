"""A Sphinx extension: what the search finds, and in which order.

search.js has what the browser does: the order, the excerpts, and which words of a query count.
"""

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish


class SearchNumbers(SearchEnglish):
    """English, with numbers: Sphinx leaves them out, and readers look for 448.

    The decimals of a longer number are not kept.
    """

    def word_filter(self, word: str) -> bool:
        """Whether the index has a word."""
        if word.isdigit():
            return word == "0" or not word.startswith("0")
        return super().word_filter(word)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_search_language(SearchNumbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""One :class:`mismatch.types.Report`, told four ways: terminal, Markdown, HTML, JSON.

``document`` the JSON document · ``summary`` what every rendering says · ``words`` metrics in plain
words · ``quantities`` and ``text`` how values and foreign strings are written · ``terminal``,
``markdown``, ``html`` the renderings · ``figures``, ``svg``, ``gauge`` their pictures ·
``worst`` the tokens that differ most.
"""

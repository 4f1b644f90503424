"""One :class:`mismatch.types.Report`, told four ways: terminal, Markdown, HTML, JSON.

``section`` what a report is made of · ``sections`` one file each · ``formatting`` how numbers and
foreign strings are written, ``summary`` metrics in plain words · ``terminal``, ``markdown``,
``html`` the renderings · ``svg`` their pictures · ``files`` what a run directory holds.
"""

"""One :class:`mismatch.types.Report`, told four ways: terminal, Markdown, HTML, JSON.

``section`` the model of a page · ``sections`` one file a section · ``formatting`` how values and
foreign strings are written · ``words`` metrics in plain words · ``summary`` facts that several
sections tell · ``terminal``, ``markdown``, ``html`` the renderings · ``figures``, ``svg`` pictures.
"""

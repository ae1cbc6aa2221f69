"""HTML pages: their document, markup, charts and wording, and the sections of the report.

Other rooms put their pages (answer, status, transfer) together from `document` and `markup`, and have no HTML of their
own.  Numbers are computed one folder up, where figures for papers lie as well; a page only shows them.
"""

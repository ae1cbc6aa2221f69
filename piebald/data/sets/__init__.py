"""Real data sets, one a file: the place of its publication, its formats, and the owners of its rows.

`download` finds their files, and `formats` reads them.  A data set knows nothing of clients: `partition` deals rows.
"""

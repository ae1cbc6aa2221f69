"""The bounded reader: whatever arrives as a file is opened here, and takes no more memory than was checked.

    files      regular files only, never waiting; text and JSON of limited length
    packed     gzip, zip, tar and npz, metered while they are unpacked
    tables     Parquet, metered by its metadata and batch by batch
    images     pictures, each by the decoder that its name calls for
    databases  SQLite without views, triggers or virtual tables, with limits

A decoder is chosen by the name of a file and never by its content.  What is refused is an `UnfitFile`, an OSError,
which callers turn into the sentence that they have for a file that cannot be read.
"""

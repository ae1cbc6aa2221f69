"""One run from call to end: prepare, run, compare, resume, adapt, and the finished run in memory.

These are the functions behind the package's front door.  The loop lies in `server`, the places where clients run in
`runtimes`, and the run folder in `storage`.
"""

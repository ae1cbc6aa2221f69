"""One run from call to end: prepare, run, compare, resume, adapt, and the finished run in memory.

These are the functions behind the package's front door.  The loop itself is `server`; where clients run is `runtimes`;
what is left on disk is `storage`.
"""

"""Deployment of a federation: a site's settings, rows and work, checks before a start, logs, status, and its page."""

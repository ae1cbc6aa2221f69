"""Deployment of a site: its settings, its rows, and its work in a run; and the status of running processes."""

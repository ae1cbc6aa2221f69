"""The TOML file of an experiment: its sections, and the recipes, clients, models and runtime that they define.

A file is checked here as far as that is possible without rows.  Nothing here trains: `runs` does.
"""

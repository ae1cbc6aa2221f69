"""From text to checked values: TOML documents with places, the wording of what is wrong with a setting, and plugins.

What a section of an experiment file means belongs to `experiments`.  Nothing here trains, reads rows or opens a
connection.
"""

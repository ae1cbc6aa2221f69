"""All that the author of a method touches: the recipe and the components of its seven axes.

A folder is an axis, a field of `Recipe` and a key in TOML, and has the same name in all three.  Attacks, named recipes,
queries to clients and choices among models are beside them.  How clients are computed (`engines`) and where they run
(`runtimes`) are not known here.
"""

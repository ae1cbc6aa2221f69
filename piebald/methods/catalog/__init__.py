"""The catalog of recipes: `recipes` offers them by name, `registry` makes and lists them."""

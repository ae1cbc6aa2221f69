"""Named recipes: one file for each method, each a few lines over the components; `methods.catalog` offers them."""

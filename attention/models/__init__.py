"""Model recipes: configuration mapping and weight names per family."""

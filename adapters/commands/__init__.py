"""Commands of `areax` that are no recipes: check, convert, plan, aot, new."""

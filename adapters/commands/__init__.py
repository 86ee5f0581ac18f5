"""Commands of `areax` other than recipes: check, convert, plan, aot, new, doctor."""

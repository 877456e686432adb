"""One batch in pieces, with the numbers of the whole."""

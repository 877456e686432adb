"""A schedule carried out: stages, messages, backward."""

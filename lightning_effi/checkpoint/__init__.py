"""Checkpoints: one file that plain Lightning loads (``full``), or a directory that every rank writes (``sharded``)."""

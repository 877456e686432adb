"""Gradients between backward and the update: windows, norms, clipping, the loss scale."""

"""Lightning's loop around the steps: lengths of loaders, signals, skipped updates."""

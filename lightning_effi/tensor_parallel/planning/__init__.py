"""From a batch to a plan: which layers can be split, and the proof of each."""

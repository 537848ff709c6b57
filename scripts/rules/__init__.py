"""The rules that `break_rules.py` breaks, besides those of the engine itself, by what they are of."""

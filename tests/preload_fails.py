"""A preload that does not import."""

raise RuntimeError("no such luck")

"""Engines run the workers of a pipeline: all in this process (`inline`), or as actors on a Ray cluster (`ray`)."""

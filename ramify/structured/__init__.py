"""Outputs that fit a schema, a pattern or a grammar: what may come next is told by llguidance."""

"""Outputs as a notebook shows them."""

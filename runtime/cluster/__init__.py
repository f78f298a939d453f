"""Placement and lifecycle of ranks: launchers (Ray, plain processes), keeper, supervisor."""

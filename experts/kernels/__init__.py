"""Compute kernels behind one signature each: torch reference and CPU fast path."""

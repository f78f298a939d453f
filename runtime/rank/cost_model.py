"""Predicted step times of one rank, learned from its real steps. Pure numbers."""

DEFAULT_MS_PER_PREFILL_ROW = 1.0
MIN_PREFILL_ROWS = 16
"""Prefill moves by at least this much in every step, whatever the prediction says."""
_SMOOTHING = 0.3
_HALF_WEIGHT_ROWS = 64.0


class CostModel:
    """Moving averages: milliseconds per prefill row, milliseconds per decode-only step."""

    def __init__(self, ms_per_prefill_row: float = DEFAULT_MS_PER_PREFILL_ROW) -> None:
        self.ms_per_prefill_row = ms_per_prefill_row
        self.decode_step_ms: float | None = None

    def prefill_rows(self, budget_ms: float) -> int:
        """Rows that fit into ``budget_ms``, never fewer than ``MIN_PREFILL_ROWS``."""
        return max(MIN_PREFILL_ROWS, int(budget_ms / self.ms_per_prefill_row))

    def observe(self, num_decodes: int, num_prefill_rows: int, step_ms: float) -> None:
        """Learn from one committed step."""
        if num_prefill_rows == 0:
            if num_decodes:
                old = self.decode_step_ms
                self.decode_step_ms = step_ms if old is None else old + _SMOOTHING * (step_ms - old)
            return
        base_ms = self.decode_step_ms or 0.0 if num_decodes else 0.0
        measured = max(step_ms - base_ms, 1e-3) / num_prefill_rows
        # A few rows carry the fixed cost of a whole step: they say little about the next row.
        weight = _SMOOTHING * num_prefill_rows / (num_prefill_rows + _HALF_WEIGHT_ROWS)
        self.ms_per_prefill_row += weight * (measured - self.ms_per_prefill_row)

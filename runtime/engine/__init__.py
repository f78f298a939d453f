"""The engine process: queue, coordinator, request records, output processing."""

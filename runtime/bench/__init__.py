"""The benchmark behind ``coterie bench``: workload, load generators, report, plot."""

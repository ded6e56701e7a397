"""AMPMonitor: what became of the steps of a run, as metrics, incidents, a table, pictures."""

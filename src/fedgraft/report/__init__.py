"""What people read about runs: metrics with intervals, tables, pages and figures."""

"""Where what a run measured is written: a contract (`api/metric_sink.py`), one file per
kind of place."""

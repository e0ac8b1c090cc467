"""Analysis: from the files of runs to tables, pictures and a report. Runs are only read."""

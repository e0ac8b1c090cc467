"""Analysis: from the files that runs leave behind to tables, pictures and a report. No run is ever touched."""

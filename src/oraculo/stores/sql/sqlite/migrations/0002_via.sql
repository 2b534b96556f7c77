-- Which broker took the task's command, so that what went to a lost one is found and sent again. No index: it is asked
-- for only when a broker is lost, and then of open runs, which `runs_status` finds.
ALTER TABLE tasks ADD COLUMN via TEXT;

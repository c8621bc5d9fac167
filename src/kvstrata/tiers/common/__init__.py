"""What tiers that keep one record per chunk share: the record, the index, jobs, tasks, claims of parts."""

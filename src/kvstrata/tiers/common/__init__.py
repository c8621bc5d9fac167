"""What tiers that keep one record per chunk share: record, index, jobs, tasks, claims, and the frame of a tier."""

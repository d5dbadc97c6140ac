"""Flow matching: schedules, transitions, sampling, scoring."""
